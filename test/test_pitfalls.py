"""Each silent pitfall of docs/pitfalls.rst: the wrong value and the right one.

A test that fails on its wrong value tells that a new release mended the pitfall: then the
page, which names the test in its source, is to be changed.
"""

import copy
import logging
import time

import pytest
import torch
from datasets import Dataset
from tensordict import TensorDict, lazy_stack, list_to_stack, set_list_to_stack
from tokenizers.decoders import ByteLevel, Replace, Sequence
from tokenizers.processors import TemplateProcessing
from torchrl.data import (
    LazyMemmapStorage,
    LazyStackStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
)
from torchrl.data.llm import History
from torchrl.objectives.llm import MCAdvantage
from transformers import GPT2Config, GPT2ForSequenceClassification
from trl import RewardConfig, RewardTrainer

PROMPTS = ("Where is the museum?", "Sorry, can you tell me the way to the museum?")
CONFIG = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}


@pytest.fixture(scope="module")
def policy_model(toy):
    return toy.AutoModelForCausalLM.from_pretrained(toy.checkpoint).eval()


@pytest.fixture(scope="module")
def reward_model(toy):
    model = toy.AutoModelForSequenceClassification.from_pretrained(toy.trained)
    return model.eval()


@pytest.fixture(scope="module")
def rollouts(toy, policy_model):
    torch.manual_seed(0)
    return toy.collect(toy.make_policy(policy_model), PROMPTS, answers=8)


@pytest.fixture(scope="module")
def conversations(toy):
    return [pair["prompt"] + pair["chosen"] for pair in toy.train_pairs[:8]]


@pytest.fixture
def tokenizer(toy):
    return copy.deepcopy(toy.tokenizer)


def encode(tokenizer, conversations, **kwargs):
    return tokenizer.apply_chat_template(
        conversations, padding=True, return_tensors="pt", return_dict=True, **kwargs
    )


@torch.no_grad()
def scores(model, ids, mask=None):
    return model(input_ids=ids, attention_mask=mask).logits[:, 0]


def policy_of(toy, model, tokenizer):
    return toy.TransformersWrapper(
        model,
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        pad_output=True,
        generate_kwargs=toy.sampling,
    )


def trainer(toy, model, rows, tmp_path, tokenizer=None, **settings):
    return RewardTrainer(
        model=model,
        args=RewardConfig(output_dir=str(tmp_path), **CONFIG, **settings),
        train_dataset=rows if not isinstance(rows, list) else Dataset.from_list(rows),
        processing_class=tokenizer or toy.tokenizer,
    )


@set_list_to_stack(True)
def rendered(tokenizer, conversation, **kwargs):
    (text,) = History.from_chats([conversation]).apply_chat_template(
        tokenizer=tokenizer, add_generation_prompt=False, **kwargs
    )
    return text


def test_another_chat_template(tokenizer, conversations):
    conversation = conversations[0]
    own = tokenizer.apply_chat_template(conversation, tokenize=False)
    assert rendered(tokenizer, conversation) == own
    for tag in ("{% generation %}", "{% endgeneration %}"):
        tokenizer.chat_template = tokenizer.chat_template.replace(tag, "")
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_start|>", "##")
    own = tokenizer.apply_chat_template(conversation, tokenize=False)
    assert own.startswith("##system")
    wrong = rendered(tokenizer, conversation)
    assert wrong.startswith("<|im_start|>system")
    right = rendered(tokenizer, conversation, chat_template=tokenizer.chat_template)
    assert right == own


def test_template_chosen_by_name(tokenizer, conversations):
    own = tokenizer.apply_chat_template(conversations[0], tokenize=False)
    tokenizer.name_or_path = "my-llama-toy"
    assert rendered(tokenizer, conversations[0]) != own
    template = tokenizer.chat_template
    assert rendered(tokenizer, conversations[0], chat_template=template) == own


def test_pad_token_that_is_the_end_token(toy, tokenizer, policy_model):
    tokenizer.pad_token = tokenizer.eos_token
    torch.manual_seed(0)
    wrong = toy.collect(policy_of(toy, policy_model, tokenizer), PROMPTS, answers=2)
    end = tokenizer.eos_token_id
    masks = wrong["masks", "all_attention_mask"]
    assert not (wrong["tokens", "full"][masks] == end).any(), "no end token is left"
    right = toy.collect(toy.make_policy(policy_model), PROMPTS, answers=2)
    masks = right["masks", "all_attention_mask"]
    assert (right["tokens", "full"][masks] == end).sum() >= 4


def test_padding_with_zero(toy, rollouts, reward_model):
    row = rollouts[-1:]
    ids = row["tokens", "full"][row["masks", "all_attention_mask"]]
    right = scores(reward_model, ids[None])
    pad = toy.tokenizer.pad_token_id
    assert pad != 0
    padded = torch.nn.functional.pad(ids, (0, 4), value=pad)[None]
    zeros = torch.nn.functional.pad(ids, (0, 4), value=0)[None]
    mask = torch.arange(padded.shape[1])[None] < len(ids)
    assert torch.allclose(scores(reward_model, padded, mask), right, atol=1e-4)
    assert (scores(reward_model, zeros, mask) - right).abs() > 0.01


def test_ragged_rows_are_padded_with_zero_unless_told(toy):
    rows = lazy_stack([TensorDict(ids=torch.full((n,), 7)) for n in (2, 3)])
    assert rows.get("ids", as_padded_tensor=True)[0, -1] == 0
    pad = toy.tokenizer.pad_token_id
    told = rows.get("ids", as_padded_tensor=True, padding_value=pad)
    assert told[0, -1] == pad


def test_left_padding_with_absolute_positions(toy):
    torch.manual_seed(0)
    pad = toy.tokenizer.pad_token_id
    size = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    config = GPT2Config(
        vocab_size=512, pad_token_id=pad, num_labels=1, initializer_range=0.2, **size
    )
    model = GPT2ForSequenceClassification(config).eval()
    ids = torch.arange(10, 20)[None]
    mask = torch.ones_like(ids)
    right = scores(model, ids, mask)
    extend = torch.nn.functional.pad
    on_the_right = scores(model, extend(ids, (0, 5), value=pad), extend(mask, (0, 5)))
    on_the_left = scores(model, extend(ids, (5, 0), value=pad), extend(mask, (5, 0)))
    assert torch.allclose(on_the_right, right, atol=1e-5)
    assert (on_the_left - right).abs() > 0.01


def test_reward_model_without_pad_token(toy, rollouts, reward_model):
    model = copy.deepcopy(reward_model)
    model.config.pad_token_id = None
    ids, mask = rollouts["tokens", "full"], rollouts["masks", "all_attention_mask"]
    with pytest.raises(ValueError, match=r"batch sizes > 1"):
        scores(model, ids, mask)
    row = ids[-1][mask[-1]]
    pad = toy.tokenizer.pad_token_id
    padded = torch.nn.functional.pad(row, (0, 4), value=pad)[None]
    right = scores(reward_model, padded)
    assert (scores(model, padded) - right).abs() > 0.01


def test_reward_model_with_another_tokenizer(rollouts, reward_model):
    """The same reward model, for a tokenizer that numbers the same tokens otherwise."""
    other_model = copy.deepcopy(reward_model)
    embeddings = other_model.get_input_embeddings().weight
    other_id = torch.randperm(len(embeddings), generator=torch.Generator().manual_seed(0))
    embeddings.data[other_id] = embeddings.data.clone()
    other_model.config.pad_token_id = other_id[reward_model.config.pad_token_id].item()
    ids, mask = rollouts["tokens", "full"], rollouts["masks", "all_attention_mask"]
    right = scores(reward_model, ids, mask)
    assert torch.allclose(scores(other_model, other_id[ids], mask), right, atol=1e-4)
    liked = right > 0
    assert liked.any()
    assert not liked.all()
    agreeing = (scores(other_model, ids, mask) > 0) == liked
    assert agreeing.float().mean() < 0.75


def test_tokenizer_that_adds_a_first_token(toy, tokenizer, policy_model):
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "<|im_start|>", "{% if not loop.first %}<|im_start|>{% endif %}", 1
    )
    first, pad = tokenizer.bos_token_id, tokenizer.pad_token_id
    processing = {"single": f"{tokenizer.bos_token} $A"}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        **processing, special_tokens=[(tokenizer.bos_token, first)]
    )
    assert tokenizer("a")["input_ids"][0] == first
    torch.manual_seed(0)
    wrong = toy.collect(policy_of(toy, policy_model, tokenizer), PROMPTS, answers=1)
    ids, masks = wrong["tokens", "full"][0], wrong["masks", "all_attention_mask"][0]
    shorter_by = len(tokenizer(PROMPTS[1])["input_ids"]) - len(
        tokenizer(PROMPTS[0])["input_ids"]
    )
    assert (ids[:shorter_by] == first).all(), "the padding is this token"
    assert masks[:shorter_by].all(), "and is attended to"
    right = toy.collect(toy.make_policy(policy_model), PROMPTS, answers=1)
    ids, masks = right["tokens", "full"][0], right["masks", "all_attention_mask"][0]
    assert (ids[:shorter_by] == pad).all()
    assert not masks[:shorter_by].any()


def test_tokenizer_that_decodes_otherwise(toy, tokenizer, policy_model):
    decoders = [ByteLevel(), Replace("the way", "theway")]
    for decoder, same in ((decoders[0], True), (Sequence(decoders), False)):
        tokenizer.backend_tokenizer.decoder = decoder
        policy = policy_of(toy, policy_model, tokenizer)
        torch.manual_seed(0)
        rollouts = toy.collect(policy, PROMPTS[:1], answers=4)
        texts = [str(text) for text in rollouts["text", "response"]]
        for text, answer in zip(texts, toy.answers_of(rollouts), strict=True):
            assert answer.endswith(".")
            assert text.startswith(answer) is same


def test_template_with_a_newline_after_the_answer(toy, tokenizer, rollouts, tmp_path):
    pair = toy.train_pairs[0]
    own = toy.tokenizer.chat_template
    newline = own.replace("{% endgeneration %}", "\n{% endgeneration %}")
    for template, last in ((own, "<|im_end|>"), (newline, "Ċ")):
        tokenizer.chat_template = template
        trained_on = trainer(toy, toy.trained, [pair], tmp_path, tokenizer).train_dataset
        ids = trained_on["chosen_ids"][0]
        assert tokenizer.convert_ids_to_tokens(ids)[-1] == last
    ids = rollouts["tokens", "full"][0][rollouts["masks", "all_attention_mask"][0]]
    assert tokenizer.convert_ids_to_tokens(ids.tolist())[-1] == "<|im_end|>"


def test_cut_answer_gets_an_end_token(toy, policy_model):
    cut = toy.collect(toy.make_policy(policy_model, max_new_tokens=5), PROMPTS, answers=1)
    again = encode(toy.tokenizer, toy.messages(cut, "full"))["input_ids"]
    end = toy.tokenizer.eos_token_id
    assert (again == end).sum() == (cut["tokens", "full"] == end).sum() + 2
    assert not toy.survives(cut).any()


def test_pairs_of_strings(toy, tmp_path):
    pair = toy.train_pairs[0]
    strings = {name: pair[name][-1]["content"] for name in pair}
    for row, expected in ((strings, False), (pair, True)):
        model = toy.trained
        ids = trainer(toy, model, [row], tmp_path).train_dataset["chosen_ids"][0]
        text = toy.tokenizer.decode(ids)
        assert ("<|im_start|>assistant" in text) is expected
        assert (strings["prompt"] + strings["chosen"] in text) is not expected


def test_prompt_given_twice(toy, tmp_path):
    pair = toy.train_pairs[0]
    full = {name: pair["prompt"] + pair[name] for name in ("chosen", "rejected")}
    question = pair["prompt"][-1]["content"]
    for row, times in (({"prompt": pair["prompt"], **full}, 2), (full, 1), (pair, 1)):
        ids = trainer(toy, toy.trained, [row], tmp_path).train_dataset["chosen_ids"][0]
        assert toy.tokenizer.decode(ids).count(question) == times


def test_answer_text_is_cut_at_the_wrong_place(toy, rollouts):
    answers = toy.answers_of(rollouts)
    texts = [str(text) for text in rollouts["text", "response"]]
    starts = [t.startswith(a) for t, a in zip(texts, answers, strict=True)]
    assert not all(starts[:8]), "part of the shorter prompt leaks into the answer"
    assert all(answer in text for text, answer in zip(texts, answers, strict=True))
    assert not any("<|im" in answer for answer in answers)


def test_first_generated_token_has_log_probability_zero(toy, rollouts, policy_model):
    loss_policy = toy.TransformersWrapper(
        policy_model,
        tokenizer=toy.tokenizer,
        input_mode="tokens",
        generate=False,
        pad_output=True,
    )
    reported = rollouts["log_probs", "response"]
    length = reported.shape[1]
    right = toy.log_probs_of(loss_policy, rollouts)[:, -length:]
    assert (reported[:, 0] == 0).all()
    assert (right[:, 0] < -0.1).any()
    mask = rollouts["masks", "all_attention_mask"][:, -length + 1 :]
    assert (reported - right)[:, 1:][mask].abs().max() < 1e-4


def surprise(model, rollouts):
    """How far sampled tokens are from a draw of the model's own, in standard errors.

    The log-probabilities of tokens drawn from a distribution have minus its entropy as
    their mean, so that their sum, each less its own mean, is 0 but for chance.
    """
    ids, mask = rollouts["tokens", "full"], rollouts["masks", "all_attention_mask"]
    start = rollouts["tokens", "prompt"].shape[1]
    drawn = mask[:, start:]
    with torch.no_grad():
        logits = model(ids, mask).logits[:, start - 1 : -1][drawn]
    choices = torch.distributions.Categorical(logits=logits)
    excess = choices.log_prob(ids[:, start:][drawn]) + choices.entropy()
    variance = (choices.probs * choices.logits**2).sum(-1) - choices.entropy() ** 2
    return (excess.sum() / variance.sum().sqrt()).item()


def test_generation_defaults_change_the_distribution(toy, policy_model, monkeypatch):
    """On a model of random weights, which gives many tokens a chance."""
    torch.manual_seed(0)
    config = copy.deepcopy(policy_model.config)
    config.initializer_range = 0.2
    model = type(policy_model)(config).eval()

    def surprise_of_answers(**settings):
        policy = toy.make_policy(model, **settings)
        return surprise(model, toy.collect(policy, PROMPTS, answers=32))

    assert abs(surprise_of_answers()) < 4
    assert surprise_of_answers(temperature=0.5) > 8
    monkeypatch.delitem(toy.sampling, "top_k")
    assert surprise_of_answers() > 8


def preference_buffer(toy, rows, **kwargs):
    buffer = ReplayBuffer(storage=LazyStackStorage(len(rows)), **kwargs)
    toy.store(buffer, [dict(row) for row in rows])
    return buffer


def test_a_stream_is_not_an_epoch(toy, tmp_path):
    rows = toy.train_pairs[:64]
    seen = []

    def watched(row):
        seen.append(row["prompt"][-1]["content"] + row["chosen"][0]["content"])
        return row

    torch.manual_seed(0)
    buffer = preference_buffer(toy, rows, sampler=SamplerWithoutReplacement())
    stream = toy.trl_dataset(buffer, list(rows[0]), batch_size=16, num_batches=None)
    settings = {"max_steps": 4, "per_device_train_batch_size": 16}
    run = trainer(
        toy,
        toy.AutoModelForSequenceClassification.from_pretrained(toy.trained),
        stream.map(watched),
        tmp_path,
        **settings,
    )
    looked_at = len(seen)
    run.train()
    assert looked_at >= 1, "building the trainer draws rows"
    unique = {row["prompt"][-1]["content"] + row["chosen"][0]["content"] for row in rows}
    assert len(set(seen[looked_at : looked_at + 64])) < len(unique)


def test_evaluation_on_a_stream_draws_other_rows(toy):
    buffer = preference_buffer(toy, toy.train_pairs[:64])
    stream = toy.trl_dataset(buffer, ["prompt", "chosen"], batch_size=16, num_batches=1)
    assert list(stream) != list(stream)
    fixed = Dataset.from_list(list(stream))
    assert list(fixed) == list(fixed)


def group(value, rewards):
    size = len(rewards)
    return TensorDict(
        query=torch.full((size,), value),
        next=TensorDict(
            reward=torch.tensor(rewards)[:, None],
            done=torch.ones(size, 1, dtype=torch.bool),
            batch_size=[size],
        ),
        batch_size=[size],
    ).unsqueeze(-1)


def test_unfinished_groups_survive_empty():
    transform = MCAdvantage(grpo_size=2)
    buffer = ReplayBuffer(storage=LazyStackStorage(10), transform=transform)
    buffer.extend(group(0, [0.0]))
    buffer.empty()
    assert len(transform.queues) == 1, "an answer of the old policy waits"
    buffer.extend(group(0, [1.0]))
    assert len(buffer) == 2, "and is grouped with one of the new policy"
    transform.clear_queues()
    assert len(transform.queues) == 0


def test_reward_keeps_its_graph(toy, rollouts, reward_model):
    assert toy.score(toy.HFRewardModelWrapper(reward_model), rollouts).requires_grad
    scorer = toy.HFRewardModelWrapper(reward_model, inference_mode=True)
    assert not toy.score(scorer, rollouts).requires_grad

    model = copy.deepcopy(reward_model)
    weight = torch.ones((), requires_grad=True)
    reward = toy.score(toy.HFRewardModelWrapper(model), rollouts).mean()
    (weight * reward).backward()
    assert any(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        (weight * reward).backward()


def test_add_stores_a_batch_as_one_row(toy):
    with set_list_to_stack(True):
        batch = lazy_stack([TensorDict(row) for row in toy.train_pairs[:4]])
        for method, length in (("add", 1), ("extend", 4)):
            buffer = ReplayBuffer(storage=LazyStackStorage(10))
            getattr(buffer, method)(batch)
            assert len(buffer) == length


@pytest.mark.parametrize(("drop_last", "lengths"), [(False, [64, 16]), (True, [64, 64])])
def test_last_batch_of_a_permutation_is_short(drop_last, lengths):
    sampler = SamplerWithoutReplacement(drop_last=drop_last)
    buffer = ReplayBuffer(storage=LazyStackStorage(80), sampler=sampler, batch_size=64)
    buffer.extend(lazy_stack([TensorDict(number=n) for n in range(80)]))
    assert [len(buffer.sample()) for _ in lengths] == lengths


def test_wrapping_a_full_buffer_pickles_it(toy):
    seconds = {}
    for name in ("empty", "full"):
        buffer = ReplayBuffer(storage=LazyStackStorage(2000))
        if name == "full":
            toy.store(buffer, toy.train_pairs[:100] * 10)
        adapter = toy.TorchRLBufferDataset(buffer, batch_size=1)
        start = time.process_time()
        adapter.as_hf_dataset()
        seconds[name] = time.process_time() - start
    assert seconds["full"] > 5 * seconds["empty"]


def test_switch_that_stays_on():
    with set_list_to_stack(False):
        with set_list_to_stack(True):
            assert list_to_stack()
        assert not list_to_stack()
        switch = set_list_to_stack(True)
        switch.set()
        assert list_to_stack(), "nothing sets it back"


def test_memmap_returns_the_first_text_for_every_row():
    rows = TensorDict(text=["first", "second", "third"], batch_size=[3])
    for storage, expected in (
        (LazyMemmapStorage, ["first"] * 3),
        (LazyStackStorage, ["first", "second", "third"]),
    ):
        buffer = ReplayBuffer(storage=storage(3), batch_size=3)
        with set_list_to_stack(True):
            buffer.extend(rows)
        assert [str(row["text"]) for row in buffer[:].unbind(0)] == expected


def test_state_dict_drops_text_and_json_keeps_it(toy, tmp_path):
    buffer = preference_buffer(toy, toy.train_pairs[:4])
    other = ReplayBuffer(storage=LazyStackStorage(4))
    other.load_state_dict(buffer.state_dict())
    assert len(other) == 4
    assert next(iter(toy.TorchRLBufferDataset(other, batch_size=1))) == {}
    path = str(tmp_path / "pairs.jsonl")
    Dataset.from_list(toy.train_pairs).to_json(path)
    again = Dataset.from_json(path, cache_dir=str(tmp_path / "cache"))
    assert again.to_list() == toy.train_pairs


def test_bf16_scores_tie(toy, rollouts, reward_model):
    ids, mask = rollouts["tokens", "full"], rollouts["masks", "all_attention_mask"]
    exact = scores(reward_model, ids, mask)
    rounded = scores(copy.deepcopy(reward_model).to(torch.bfloat16), ids, mask)
    different = {round(score, 6) for score in exact.tolist()}
    assert len(set(rounded.tolist())) < len(different)


def test_train_mode_scores_at_random(toy, rollouts):
    load = toy.AutoModelForSequenceClassification.from_pretrained
    model = load(toy.trained, attention_dropout=0.2).train()
    scorer = toy.HFRewardModelWrapper(model, inference_mode=True)
    first, second = (toy.score(scorer, rollouts) for _ in range(2))
    assert not torch.allclose(first, second, atol=1e-3)
    model.eval()
    first, second = (toy.score(scorer, rollouts) for _ in range(2))
    assert torch.equal(first, second)


def test_trainer_leaves_the_model_in_train_mode(toy, tmp_path):
    model = toy.AutoModelForSequenceClassification.from_pretrained(toy.trained).eval()
    trainer(toy, model, toy.train_pairs[:8], tmp_path, max_steps=1).train()
    assert model.training


def test_max_length_drops_rows(toy, tmp_path):
    rows = toy.train_pairs[:32]
    lengths = [
        len(toy.tokenizer.apply_chat_template(row["prompt"] + row["chosen"])["input_ids"])
        for row in rows
    ]
    limit = sorted(lengths)[16]
    kept = trainer(toy, toy.trained, rows, tmp_path, max_length=limit).train_dataset
    assert 0 < len(kept) < len(rows)
    assert len(trainer(toy, toy.trained, rows, tmp_path).train_dataset) == len(rows)


def test_missing_key_only_warns(toy, caplog):
    buffer = preference_buffer(toy, toy.train_pairs[:4])
    adapter = toy.TorchRLBufferDataset(buffer, batch_size=1, keys=["prompt", "chosne"])
    logger = logging.getLogger("torchrl")
    logger.addHandler(caplog.handler)
    assert list(next(iter(adapter))) == ["prompt"]
    logger.removeHandler(caplog.handler)
    assert "chosne" in caplog.text
