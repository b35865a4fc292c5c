"""Run a script cell by cell in this process and write its outcomes to a folder.

Usage: python run_cells.py SCRIPT FOLDER

FOLDER gets outcomes.json, a copy of the toy checkpoints that the script made, the trained
reward model, and in names.json the values of PLAIN_NAMES. The outcomes are computed here
from what the script's variables hold, not from what it printed.
"""

import contextlib
import io
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from datasets import Dataset
from tensordict import list_to_stack, set_list_to_stack
from trl import RewardConfig, RewardTrainer

PLAIN_NAMES = ("SYSTEM_PROMPT", "sampling", "train_pairs", "held_out_pairs")
KIND = ("Gladly", "Of course", "With pleasure")


def execute(script, folder):
    """Run the script's cells, timing each, and copy the checkpoints they make."""
    namespace = {"__name__": "__main__"}
    printed, seconds = io.StringIO(), {}
    title, lines = "setup", 0
    for cell in re.split(r"(?m)^(?=# %%\n)", script.read_text()):
        title = [title, *re.findall(r"(?m)^# (\d\.\d) ", cell)][-1]
        code = compile("\n" * lines + cell, str(script), "exec")
        lines += cell.count("\n")
        start = time.process_time()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        seconds[title] = seconds.get(title, 0) + time.process_time() - start
        for name in ("checkpoint", "reward_checkpoint"):
            if name in namespace and not (folder / name).exists():
                shutil.copytree(namespace[name], folder / name)
        if title == "2.2" and "first_answers" not in namespace:
            namespace["first_answers"] = texts(namespace["rollouts"])
    return namespace, printed.getvalue(), seconds


@set_list_to_stack(True)
def texts(rollouts):
    return [history[-1].content for history in rollouts["history", "full"].unbind(0)]


def share(rollouts):
    answers = texts(rollouts)
    return sum(answer.startswith(KIND) for answer in answers) / len(answers)


def user_prompts(rows):
    return {row["prompt"][-1]["content"] for row in rows}


def parameters(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def moved(first, second):
    """The largest change of any parameter that two models have in common."""
    first, second = parameters(first), parameters(second)
    return max((first[k] - second[k]).abs().max().item() for k in first.keys() & second)


def bare_scores(model, rollouts):
    """Scores without TorchRL and without padding, one row at a time."""
    masks = rollouts["masks", "all_attention_mask"]
    with torch.no_grad():
        return torch.stack(
            [
                model(input_ids=ids[mask][None]).logits[0, 0]
                for ids, mask in zip(rollouts["tokens", "full"], masks, strict=True)
            ]
        )


@set_list_to_stack(True)
def advantages(ns):
    """Advantages from the script's buffer for its first answers, and recomputed ones."""
    buffer = ns["grpo_buffer"]
    buffer.empty()
    buffer.extend(ns["annotate"](ns["new_rollouts"][:32].copy()))
    rows = buffer[:]
    groups = rows["next", "reward"].reshape(-1, 8)
    centered = groups - groups.mean(-1, keepdim=True)
    expected = centered / groups.std(-1, keepdim=True).clamp_min(1e-6)
    return rows["advantage"].flatten(), expected.flatten()


def tokenized_by_trl(namespace, pairs, folder):
    """Token ids that a RewardTrainer makes from pairs: two lists, chosen and rejected."""
    trainer = RewardTrainer(
        model=namespace["classifier"],
        args=RewardConfig(
            output_dir=str(folder), use_cpu=True, bf16=False, report_to="none"
        ),
        train_dataset=Dataset.from_list(pairs),
        processing_class=namespace["tokenizer"],
    )
    rows = trainer.train_dataset
    return list(rows["chosen_ids"]), list(rows["rejected_ids"])


def outcomes(ns, folder):
    """What the script achieved, as plain numbers, strings and lists."""
    reward_model, tokenizer = ns["reward_model"], ns["tokenizer"]
    rollouts, new_rollouts, batch = ns["rollouts"], ns["new_rollouts"], ns["batch"]
    generated = {tuple(ids) for ids in ns["generated_ids"](rollouts)}
    chosen, rejected = tokenized_by_trl(ns, ns["train_pairs"], folder)
    held_out = user_prompts(ns["held_out_pairs"])
    bare = bare_scores(reward_model, new_rollouts)
    return {
        "first_rewards": ns["rewards"].tolist(),
        "first_answers_kind": [answer.startswith(KIND) for answer in ns["first_answers"]],
        "accuracy_before": ns["accuracy_before"],
        "accuracy_after": ns["accuracy_after"],
        "identical": ns["matching"],
        "survives": ns["surviving"].tolist(),
        "share_before": share(new_rollouts),
        "share_after": share(ns["after"]),
        "trl_share_after": share(ns["trl_after"]),
        "progress": ns["progress"],
        "pairs": [len(ns["train_pairs"]), len(ns["held_out_pairs"])],
        "rows_in_buffer": len(ns["preferences"]),
        "held_out_prompts_trained_on": sorted(user_prompts(ns["train_pairs"]) & held_out),
        "grpo_prompts_held_out": sorted(set(batch["query"]) & held_out),
        "trl_grpo_prompts_held_out": sorted(
            user_prompts(ns["prompt_stream"].take(200)) & held_out
        ),
        "trl_ids_are_generated_ids": all(
            tuple(ids) in generated for ids in (*chosen, *rejected)
        ),
        "prompt_in_trl_ids": all(
            ns["SYSTEM_PROMPT"] in text and row["prompt"][-1]["content"] in text
            for row, text in zip(
                ns["train_pairs"], tokenizer.batch_decode(chosen), strict=True
            )
        ),
        "chosen_liked": all(
            row["chosen"][0]["content"].startswith(KIND)
            and not row["rejected"][0]["content"].startswith(KIND)
            for row in ns["train_pairs"] + ns["held_out_pairs"]
        ),
        "in_keys": [list(key) for key in ns["scorer"].in_keys],
        "scored_model_is_trained_model": ns["scorer"].model is reward_model,
        "scores_equal_bare_logits": (ns["scores_after"] - bare).abs().max().item(),
        "scores_written": torch.equal(
            new_rollouts["next", "reward"][:, 0, 0], ns["scores_after"]
        ),
        "score_margin": (
            ns["scores_after"][ns["liked"]].mean()
            - ns["scores_after"][~ns["liked"]].mean()
        ).item(),
        "agreement": ns["agreement"],
        "reward_shape": list(batch["next", "reward"].shape),
        "rows": len(batch),
        "advantage_shape": list(batch["advantage"].shape),
        "groups_left_over": len(ns["grpo_buffer"].transform[0].queues),
        "log_probs_differ": ns["differences"][ns["generated"]].abs().max().item(),
        "reward_model_moved_in_training": moved(reward_model, ns["first_model"]),
        "policy_moved": moved(ns["model"], ns["first_model"]),
        "trl_policy_moved": moved(ns["trl_model"], ns["first_model"]),
        "reference_moved": moved(ns["reference"].model, ns["language_model"])
        if "language_model" in ns
        else 0.0,
        "rewards_changed_after_training": (
            ns["score"](ns["scorer"], new_rollouts) - ns["scores_after"]
        )
        .abs()
        .max()
        .item(),
        "reward_model_gradients": sum(
            p.grad is not None for p in reward_model.parameters()
        ),
        "reward_model_in_eval": not reward_model.training,
    }


def process_state():
    """What a well-behaved script leaves as it found it."""
    return {
        "list_to_stack": list_to_stack(),
        "environment": dict(os.environ),
        "working_directory": sorted(os.listdir()),
        "temporary_files": sorted(os.listdir(tempfile.gettempdir())),
        "home": sorted(str(p) for p in Path.home().rglob("*") if p.is_file()),
        "default_dtype": str(torch.get_default_dtype()),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "style": {k: repr(v) for k, v in plt.rcParams.items()},
        "start_method": multiprocessing.get_start_method(allow_none=True),
    }


if __name__ == "__main__":
    script, folder = Path(sys.argv[1]), Path(sys.argv[2])
    before, start = process_state(), time.perf_counter()
    namespace, printed, seconds = execute(script, folder)
    total, after = time.perf_counter() - start, process_state()
    result = outcomes(namespace, folder)
    advantage, expected = (values.tolist() for values in advantages(namespace))
    result["advantages"], result["expected_advantages"] = advantage, expected
    result["printed"], result["cpu_seconds"] = printed, seconds
    result["seconds"] = total
    result["leaked"] = {k: [v, after[k]] for k, v in before.items() if after[k] != v}
    result["workspace_left"] = Path(namespace["workspace"].name).exists()
    namespace["reward_model"].save_pretrained(folder / "trained")
    plain = {name: namespace[name] for name in PLAIN_NAMES}
    (folder / "names.json").write_text(json.dumps(plain))
    (folder / "outcomes.json").write_text(json.dumps(result))
