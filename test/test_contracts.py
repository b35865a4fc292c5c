"""What docs/contracts.rst says, row by row; the page's source names these tests."""

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from transformers import PrinterCallback
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

ON_CPU = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "learning_rate": 1e-3,
}


def preference(pair):
    return pair


def verdict(pair):
    return {"prompt": pair["prompt"], "completion": pair["chosen"], "label": True}


def refusal(pair):
    return {"prompt": pair["prompt"], "completion": pair["rejected"], "label": False}


def demonstration(pair):
    return {"prompt": pair["prompt"], "completion": pair["chosen"]}


def prompt_only(pair):
    return {"prompt": pair["prompt"]}


def likes(completions, **kwargs):
    return [float(completion[0]["content"][0] in "GOW") for completion in completions]


SAMPLING = {"num_generations": 2, "max_completion_length": 8}
TRAINERS = {
    "Reward": (RewardTrainer, RewardConfig, [preference], {}, {}),
    "DPO": (DPOTrainer, DPOConfig, [preference], {}, {}),
    "KTO": (KTOTrainer, KTOConfig, [verdict, refusal], {}, {}),
    "SFT": (SFTTrainer, SFTConfig, [demonstration], {}, {}),
    "GRPO": (GRPOTrainer, GRPOConfig, [prompt_only], SAMPLING, {"reward_funcs": likes}),
    "RLOO": (RLOOTrainer, RLOOConfig, [prompt_only], SAMPLING, {"reward_funcs": likes}),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_trainer_takes_two_steps_from_a_buffer(name, toy, tmp_path):
    trainer_class, config_class, forms, settings, arguments = TRAINERS[name]
    rows = [form(pair) for pair in toy.train_pairs[:16] for form in forms]
    buffer = ReplayBuffer(storage=LazyStackStorage(100))
    dataset = toy.trl_dataset(buffer, list(rows[0]), batch_size=4, num_batches=None)
    toy.store(buffer, rows)
    load = toy.AutoModelForCausalLM.from_pretrained
    if name == "Reward":
        model = toy.AutoModelForSequenceClassification.from_pretrained(
            toy.checkpoint, num_labels=1
        )
    else:
        model = load(toy.checkpoint)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trainer = trainer_class(
        model=model,
        args=config_class(output_dir=str(tmp_path), **ON_CPU, **settings),
        train_dataset=dataset,
        processing_class=toy.tokenizer,
        **arguments,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    assert trainer.state.global_step == 2
    pairs = zip(before, model.parameters(), strict=True)
    assert any(not torch.equal(old, new) for old, new in pairs)


def test_message_lists_come_out_as_stacks(toy):
    buffer = ReplayBuffer(storage=LazyStackStorage(10))
    toy.store(buffer, toy.train_pairs[:1])
    row = next(iter(toy.TorchRLBufferDataset(buffer, batch_size=1)))
    assert set(row) == {"prompt", "chosen", "rejected"}
    assert all(isinstance(value, NonTensorStack) for value in row.values())
    assert toy.plain_lists(row) == toy.train_pairs[0]


def test_tensors_strings_and_nested_keys(toy):
    buffer = ReplayBuffer(storage=LazyStackStorage(10))
    ids = torch.arange(3)
    row = TensorDict(tokens=TensorDict(full=ids), query="who?")
    buffer.extend(lazy_stack([row]))
    (out,) = toy.TorchRLBufferDataset(buffer, batch_size=1)
    assert out["query"] == "who?"
    assert torch.equal(out["tokens.full"], ids)
    assert "tokens" not in out


def test_trainer_refuses_the_torch_dataset(toy, tmp_path):
    buffer = ReplayBuffer(storage=LazyStackStorage(10))
    toy.store(buffer, toy.train_pairs[:4])
    with pytest.raises((TypeError, ValueError, AttributeError)):
        RewardTrainer(
            model=toy.trained,
            args=RewardConfig(output_dir=str(tmp_path), **ON_CPU),
            train_dataset=toy.TorchRLBufferDataset(buffer, batch_size=4),
            processing_class=toy.tokenizer,
        )


@pytest.fixture(scope="module")
def rollouts(toy):
    policy = toy.make_policy(toy.AutoModelForCausalLM.from_pretrained(toy.checkpoint))
    prompts = ("Where is the museum?", "Sorry, can you tell me the way to the museum?")
    torch.manual_seed(0)
    return toy.collect(policy, prompts, answers=3)


def test_rollout_keys_shapes_and_types(toy, rollouts):
    tokens, masks = rollouts["tokens"], rollouts["masks"]
    rows, length = tokens.full.shape
    assert rows == 6
    assert tokens.full.dtype == torch.long
    assert masks.all_attention_mask.dtype == torch.bool
    assert masks.all_attention_mask.shape == (rows, length)
    assert masks.all_assistant_mask is None
    assert tokens.prompt.shape[1] + tokens.response.shape[1] == length
    assert rollouts["next", "done"].shape == (rows, 1)
    assert rollouts["log_probs"].full is None
    assert rollouts["log_probs"].response.shape == tokens.response.shape
    pad = toy.tokenizer.pad_token_id
    assert (tokens.prompt[0] == pad).nonzero()[0] == 0, "prompts are padded on the left"
    assert bool((tokens.full == pad).eq(~masks.all_attention_mask).all())


def test_reward_shapes(toy, rollouts):
    model = toy.AutoModelForSequenceClassification.from_pretrained(toy.trained).eval()
    scorer = toy.HFRewardModelWrapper(model, inference_mode=True)
    reward = toy.score(scorer, rollouts)
    assert reward.shape == (6,)
    assert reward.dtype == torch.float32


@pytest.mark.parametrize("shape", ["[B]", "[B, 1]", "[B, 1, 1]"])
def test_grpo_loss_takes_one_reward_shape(toy, rollouts, shape):
    model = toy.AutoModelForCausalLM.from_pretrained(toy.checkpoint).eval()
    loss_policy = toy.TransformersWrapper(
        model,
        tokenizer=toy.tokenizer,
        input_mode="tokens",
        generate=False,
        pad_output=True,
    )
    data = rollouts.copy()
    data["log_probs", "full"] = loss_policy(data.copy())["log_probs", "full"].detach()
    advantage = torch.linspace(-1, 1, 6)
    data["advantage"] = advantage.reshape(6, *[1] * shape.count("1"))
    loss = toy.GRPOLoss(loss_policy, entropy_bonus=False)
    if shape == "[B, 1, 1]":
        assert loss(data).loss_objective.isfinite()
    else:
        with pytest.raises((RuntimeError, ValueError)):
            loss(data)
