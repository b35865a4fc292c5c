"""What docs/contracts.rst says, row by row; the page's source names these tests."""

import pytest
import torch
from datasets import Dataset
from tensordict import NonTensorStack, TensorDict, lazy_stack, set_list_to_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.llm import History
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

PROMPTS = ("Where is the museum?", "Sorry, can you tell me the way to the museum?")
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


@pytest.fixture(scope="module")
def policy_model(toy):
    return toy.AutoModelForCausalLM.from_pretrained(toy.checkpoint).eval()


@pytest.fixture(scope="module")
def rollouts(toy, policy_model):
    torch.manual_seed(0)
    return toy.collect(toy.make_policy(policy_model), PROMPTS, answers=3)


def test_rollout_keys_shapes_and_types(toy, rollouts):
    tokens, masks = rollouts["tokens"], rollouts["masks"]
    rows, length = tokens.full.shape
    assert rows == 6
    assert set(rollouts["query"]) == set(PROMPTS)
    with set_list_to_stack(True):
        for part, turns in (("prompt", 2), ("response", 1), ("full", 3)):
            assert isinstance(rollouts["history", part], History)
            assert rollouts["history", part].shape == (rows, turns)
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


def test_score_pads_as_the_classifier_expects(toy, policy_model):
    policy = toy.make_policy(policy_model)
    torch.manual_seed(0)
    batches = [toy.collect(policy, [prompt], answers=2) for prompt in PROMPTS]
    rows = [row.select("tokens", "masks") for batch in batches for row in batch.unbind(0)]
    model = toy.AutoModelForSequenceClassification.from_pretrained(toy.trained).eval()
    scorer = toy.HFRewardModelWrapper(model, inference_mode=True)
    together = toy.score(scorer, lazy_stack(rows))
    alone = [toy.score(scorer, lazy_stack([row])) for row in rows]
    assert torch.allclose(together, torch.cat(alone), atol=1e-4)


def loss_policy_of(toy, **kwargs):
    return toy.TransformersWrapper(
        toy.AutoModelForCausalLM.from_pretrained(toy.checkpoint).eval(),
        tokenizer=toy.tokenizer,
        generate=False,
        pad_output=True,
        **kwargs,
    )


def grpo_loss(toy, rollouts, *, advantage_dims=3, input_mode="tokens", recompute=True):
    """The loss of rollouts, right unless one of the settings is changed."""
    data = rollouts.copy()
    if recompute:
        policy = loss_policy_of(toy, input_mode="tokens")
        data["log_probs", "full"] = toy.log_probs_of(policy, data)
    advantage = torch.linspace(-1, 1, len(data))
    data["advantage"] = advantage.reshape(-1, *[1] * (advantage_dims - 1))
    policy = loss_policy_of(
        toy, input_mode=input_mode, chat_template=toy.tokenizer.chat_template
    )
    with set_list_to_stack(True):
        return toy.GRPOLoss(policy, entropy_bonus=False)(data).loss_objective


def test_grpo_loss_takes_one_reward_shape(toy, rollouts):
    assert grpo_loss(toy, rollouts).isfinite()
    with pytest.raises(ValueError, match="the same number of dimensions"):
        grpo_loss(toy, rollouts, advantage_dims=2)
    with pytest.raises(RuntimeError, match="invalid slice"):
        grpo_loss(toy, rollouts, advantage_dims=1)


def preference_trainer(toy, dataset, tmp_path, **settings):
    return RewardTrainer(
        model=toy.trained,
        args=RewardConfig(output_dir=str(tmp_path), **ON_CPU | settings),
        train_dataset=dataset,
        processing_class=toy.tokenizer,
    )


@pytest.fixture
def adapter(toy):
    buffer = ReplayBuffer(storage=LazyStackStorage(10))
    toy.store(buffer, toy.train_pairs[:4])
    return toy.TorchRLBufferDataset(buffer, batch_size=4, num_batches=None)


def test_error_message_lists_as_stacks(toy, adapter, tmp_path):
    trainer = preference_trainer(toy, adapter.as_hf_dataset(), tmp_path)
    with pytest.raises(AttributeError, match="'NonTensorStack' object has no attribute"):
        trainer.train()


def test_error_adapter_instead_of_dataset(toy, adapter, tmp_path):
    with pytest.raises(TypeError, match="dataset"):
        preference_trainer(toy, adapter, tmp_path)


def test_error_no_end(toy, adapter, tmp_path):
    dataset = adapter.as_hf_dataset().map(toy.plain_lists)
    with pytest.raises(ValueError, match="max_steps"):
        preference_trainer(toy, dataset, tmp_path, max_steps=-1)


def test_error_workers(toy, adapter, tmp_path):
    dataset = adapter.as_hf_dataset().map(toy.plain_lists)
    trainer = preference_trainer(toy, dataset, tmp_path, dataloader_num_workers=1)
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        trainer.train()


def test_error_ragged_rows(toy, rollouts):
    buffer = ReplayBuffer(storage=LazyStackStorage(10))
    rows = [TensorDict(query="who?", ids=torch.arange(n)) for n in (2, 3)]
    buffer.extend(lazy_stack(rows))
    stream = toy.TorchRLBufferDataset(buffer, batch_size=8, keys=["query"])
    with pytest.raises(RuntimeError, match="Failed to stack tensors"):
        next(iter(stream))


def test_error_conversation_outside_of_the_switch(toy, rollouts):
    with set_list_to_stack(False), pytest.raises(RuntimeError, match="list_to_stack"):
        History.from_chats([toy.train_pairs[0]["prompt"]])


def test_error_log_probs_not_recomputed(toy, rollouts):
    with pytest.raises(KeyError, match="log_probs"):
        grpo_loss(toy, rollouts, recompute=False)


def test_error_loss_in_history_mode(toy, policy_model):
    cut = toy.collect(toy.make_policy(policy_model, max_new_tokens=5), PROMPTS, answers=2)
    with pytest.raises(ValueError, match="Mask shape"):
        grpo_loss(toy, cut, input_mode="history")


def test_error_no_step_counter(toy, rollouts):
    rollouts = rollouts.clone()
    rollouts["next", "done"] = torch.zeros_like(rollouts["next", "done"])
    rollouts["next", "reward"] = torch.zeros(len(rollouts), 1, 1)
    with pytest.raises(RuntimeError, match="Expected the trajectory to be done"):
        toy.MCAdvantage(grpo_size=3).inv(rollouts[:1])


def test_error_model_only_in_memory(toy, tmp_path):
    model = toy.AutoModelForCausalLM.from_config(
        toy.AutoModelForCausalLM.from_pretrained(toy.checkpoint).config
    )
    model.config._name_or_path = ""
    with pytest.raises(OSError, match="Repo id"):
        DPOTrainer(
            model=model,
            args=DPOConfig(output_dir=str(tmp_path), **ON_CPU),
            train_dataset=Dataset.from_list(toy.train_pairs[:4]),
            processing_class=toy.tokenizer,
        )
