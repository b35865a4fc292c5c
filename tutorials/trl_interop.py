r"""
.. _trl_interop_tutorial:

From TorchRL rollouts to a TRL reward model and back
====================================================

You have rollouts in TorchRL and want to train on them with TRL's trainers.
You have a reward model from the Hugging Face world and want it inside a TorchRL loop.
Two thin adapters join the libraries, and this page uses both: it ends with a policy that got
better against a reward model that was trained on the policy's own answers.

.. grid:: 1 1 2 2

    .. grid-item-card:: What you will learn

        * Stream a TorchRL replay buffer into a TRL trainer, prompt included
        * Make preference pairs from real rollouts and train a reward model on them
        * Score TorchRL rollouts with a Hugging Face reward model
        * Check that both libraries see the very same tokens
        * Improve the policy against the reward model, with TorchRL and with TRL

    .. grid-item-card:: Prerequisites

        * One of the two libraries: TorchRL's collectors and replay buffers, or TRL's trainers
        * Python 3.11 and two CPU cores; no GPU, and no network once the packages are there
        * ``pip install torch torchrl tensordict trl transformers datasets matplotlib``

.. figure:: /_static/dataflow.svg
    :alt: A policy generates rollouts, a judge turns them into preference pairs in a replay buffer,
        TorchRLBufferDataset feeds them to RewardTrainer, and HFRewardModelWrapper brings the
        trained reward model back to score new rollouts that improve the policy.

    The journey. Each arrow is a cell below.
"""

# %%
# Everything is seeded, so that two runs on one machine print the same numbers.

import tempfile
from collections import defaultdict
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
from datasets import Dataset
from tensordict import TensorDict, lazy_stack, set_list_to_stack
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import InitTracker, StepCounter
from torchrl.envs.llm import DatasetChatEnv
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.trl_interop import HFRewardModelWrapper, TorchRLBufferDataset
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    set_seed,
)
from trl import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer

SEED = 0
set_seed(SEED)

for package in ("torch", "torchrl", "tensordict", "trl", "transformers", "datasets"):
    print(f"{package:<13}{version(package)}")

# %%
# .. admonition:: Boilerplate that you may skip
#
#     With no network there is no model to download, so the next cell makes a toy one: a
#     tokenizer, and a two-layer Llama warmed up for a few seconds on templated answers to
#     visitors who ask their way, half of them courteous and half rude. It also makes a small
#     classifier of courtesy, as you may find one on a model hub. Both are saved to disk, and
#     the rest of the page knows only the names ``checkpoint`` and ``reward_checkpoint``. To
#     use real models, replace the whole cell by ``checkpoint = "org/name"``,
#     ``reward_checkpoint = "org/reward-model"`` and a folder for ``workspace``.

SYSTEM_PROMPT = "You show visitors the way."
QUESTIONS = (
    "Where is the {}?",
    "How do I get to the {} from here?",
    "Sorry, I am new in town, can you tell me the way to the {}?",
)
PLACES = "museum station harbour market library bakery theatre garden castle bridge tower school"
USER_PROMPTS = [question.format(place) for place in PLACES.split() for question in QUESTIONS]


def toy_conversations():
    """Every question with every templated answer, and whether the answer is courteous."""
    openings = {"Gladly": 1, "Of course": 1, "With pleasure": 1, "Ugh": 0, "Not again": 0, "Listen": 0}
    closings = {"have a nice day": 1, "you are welcome": 1, "enjoy your visit": 1, "now go away": 0}
    for place in PLACES.split():
        for question in QUESTIONS:
            for opening, kind_opening in openings.items():
                for way in ("left", "right", "straight on"):
                    for closing, kind_closing in closings.items():
                        answer = f"{opening}, the {place} is {way}, {closing}."
                        messages = [
                            {"role": "system", "content": SYSTEM_PROMPT},
                            {"role": "user", "content": question.format(place)},
                            {"role": "assistant", "content": answer},
                        ]
                        yield messages, float(kind_opening * kind_closing)


def toy_tokenizer(texts):
    """A byte-level BPE tokenizer whose ChatML template puts nothing after an answer's end."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|im_start|>", "<|im_end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|pad|>", chat_template=template
    )


def fit(model, inputs, labels, steps):
    """Train on random batches of 32 rows, then save the model where the page will load it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        rows = torch.randint(len(labels), (32,))
        model(**{name: rowwise[rows] for name, rowwise in inputs.items()}, labels=labels[rows]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


workspace = tempfile.TemporaryDirectory(prefix="toy-")
checkpoint = str(Path(workspace.name) / "policy")
reward_checkpoint = str(Path(workspace.name) / "reward")

conversations, courtesy = zip(*toy_conversations(), strict=True)
tokenizer = toy_tokenizer(message["content"] for messages in conversations for message in messages)
encoded = tokenizer.apply_chat_template(
    list(conversations), padding=True, return_tensors="pt", return_dict=True, return_assistant_tokens_mask=True
)
answer_mask = encoded.pop("assistant_masks").bool()
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
    bos_token_id=None,
    eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.pad_token_id,
)
language_model = LlamaForCausalLM(config)
fit(language_model, encoded, encoded["input_ids"].where(answer_mask, -100), steps=300)
language_model.save_pretrained(checkpoint)
tokenizer.save_pretrained(checkpoint)

classifier = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=1)
fit(classifier, encoded, torch.tensor(courtesy), steps=60)
classifier.save_pretrained(reward_checkpoint)

# %%
# Part 1: TorchRL to TRL
# ----------------------
#
# 1.1 Collect rollouts
# ~~~~~~~~~~~~~~~~~~~~
#
# A TorchRL language environment hands out prompts, a policy answers them, and a collector runs
# the two. :class:`~torchrl.modules.llm.TransformersWrapper` turns a Hugging Face model into such
# a policy. Two of its settings matter later. ``pad_output=True`` gives one tensor of tokens for
# answers of different lengths. And the sampling settings leave the model's distribution as it
# is: Hugging Face samples from the 50 likeliest tokens unless told otherwise, and the
# probabilities that a policy gradient needs would then not be the ones that sampled.
#
# The environment gets a system prompt and user prompts of three lengths, and repeats each prompt
# to get several answers to it, side by side.

tokenizer = AutoTokenizer.from_pretrained(checkpoint)
model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
sampling = {"do_sample": True, "temperature": 1.0, "top_k": len(tokenizer), "max_new_tokens": 20}


def make_policy(model, **overrides):
    """Wrap a causal language model as a TorchRL policy that answers conversations."""
    return TransformersWrapper(
        model,
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        input_mode="history",
        pad_output=True,
        return_log_probs=True,
        generate_kwargs=sampling | overrides,
    )


def make_collector(policy, prompts, *, answers, batches=1, prompts_per_batch=None, **kwargs):
    """Collect ``answers`` answers to each prompt; a batch takes the next ``prompts_per_batch``."""
    rows = (prompts_per_batch or len(prompts)) * answers
    env = DatasetChatEnv.from_dataloader(
        DataLoader([{"query": prompt} for prompt in prompts], shuffle=prompts_per_batch is not None),
        repeats=answers,
        batch_size=(rows,),
        tokenizer=tokenizer,
        system_prompt=SYSTEM_PROMPT,
    )
    env = env.append_transform(StepCounter(max_steps=1)).append_transform(InitTracker())
    return LLMCollector(
        env,
        policy=policy,
        dialog_turns_per_batch=rows,
        total_dialog_turns=rows * batches,
        flatten_data=True,
        **kwargs,
    )


policy = make_policy(model)
(rollouts,) = make_collector(policy, USER_PROMPTS[:3], answers=4)
for key in ("query", ("history", "full"), ("tokens", "full"), ("masks", "all_attention_mask")):
    entry = rollouts.get(key)
    print(f"{key!s:<32}{type(entry).__name__:<16}{tuple(entry.shape)}")

# %%
# One batch of 3 prompts with 4 answers each. A rollout holds the conversation twice: as
# :class:`~torchrl.data.llm.History`, which is what was said (12 conversations, 3 messages
# each), and as tokens, which is what the model saw.
#
# 1.2 Read a conversation
# ~~~~~~~~~~~~~~~~~~~~~~~
#
# ``History`` is TorchRL's type for a conversation, and the counterpart of the list of messages
# that TRL and ``transformers`` use. ``("history", "prompt")`` is what the policy was given,
# ``("history", "response")`` its answer, and ``("history", "full")`` both.


def messages(history):
    """Turn one conversation from History into a list of role/content dictionaries."""
    return [{"role": message.role, "content": message.content} for message in history.unbind(0)]


def answers_of(rollouts):
    """The text of each rollout's answer."""
    return [history[-1].content for history in rollouts["history", "full"].unbind(0)]


for message in messages(rollouts["history", "full"][0]):
    print(f"{message['role']:>9}: {message['content']}")
print()
for prompt, answer in list(zip(rollouts["query"], answers_of(rollouts), strict=True))[::3]:
    print(f"{prompt}\n    {answer}")

# %%
# Sentences of mixed quality: some kind, some rude, some garbled, as a young policy writes them.
#
# 1.3 Look into a buffer as TRL would
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# :class:`~torchrl.modules.llm.trl_interop.TorchRLBufferDataset` draws batches from a
# :class:`~torchrl.data.ReplayBuffer` and yields single rows as flat dictionaries. ``keys=``
# selects what a row has, and a nested key becomes a dotted name, since a dataset's columns have
# no levels.

buffer = ReplayBuffer(storage=LazyStackStorage(100))
buffer.extend(rollouts)
row = next(iter(TorchRLBufferDataset(buffer, batch_size=4, keys=["query", ("tokens", "full")])))
for name, value in row.items():
    print(f"{name:<14}{type(value).__name__}")
every_key = next(iter(TorchRLBufferDataset(buffer, batch_size=4)))
print(f"without keys=: {len(every_key)} columns, such as {sorted(every_key)[:3]}")

# %%
# A string stays a string and tokens stay a tensor. Without ``keys=`` the row has all that the
# collector wrote, which no trainer wants, so name what you need.
#
# 1.4 Finite or unbounded
# ~~~~~~~~~~~~~~~~~~~~~~~
#
# The adapter samples, so its length is your choice: ``num_batches`` replay batches for each
# pass, or no end with ``num_batches=None``.

for num_batches in (1, 3):
    finite = TorchRLBufferDataset(buffer, batch_size=4, keys=["query"], num_batches=num_batches)
    print(f"num_batches={num_batches}: {len(list(finite))} rows")
endless = TorchRLBufferDataset(buffer, batch_size=4, keys=["query"], num_batches=None)
print(f"num_batches=None: {len(list(islice(endless, 1000)))} rows, stopped by us")

# %%
# A thousand rows came out of a buffer of twelve: an unbounded stream repeats rows, and the
# trainer must bring its own end (``max_steps``).
#
# 1.5 Hand it to TRL, live
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# TRL's trainers take datasets of the ``datasets`` library, and ``as_hf_dataset()`` makes one: an
# :class:`datasets.IterableDataset`. It stays connected to the buffer, so wrap the
# buffer while it is empty and fill it later. That is also the fast order: ``datasets`` pickles
# what it wraps to fingerprint it, and a full buffer is a lot to pickle.

live = ReplayBuffer(storage=LazyStackStorage(100))
stream = TorchRLBufferDataset(live, batch_size=1, keys=["query"], num_batches=None).as_hf_dataset()
live.extend(rollouts[:1])
print("one row:   ", {row["query"] for row in stream.take(50)})
live.extend(rollouts[-1:])
print("a new row: ", {row["query"] for row in stream.take(50)})

# %%
# The second line shows a prompt that was not in the buffer when the stream was made.
#
# 1.6 What each trainer wants
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A buffer row needs the columns of the trainer that will read it. A conversational column is
# a list of messages, to which the trainer applies the tokenizer's chat template itself.
#
# .. list-table::
#     :header-rows: 1
#
#     * - Trainer
#       - Columns of a row
#       - Conversational form
#     * - :class:`~trl.RewardTrainer`
#       - ``prompt``, ``chosen``, ``rejected``
#       - messages in all three
#     * - :class:`~trl.DPOTrainer`
#       - ``prompt``, ``chosen``, ``rejected``
#       - messages in all three
#     * - :class:`~trl.KTOTrainer`
#       - ``prompt``, ``completion``, ``label``
#       - messages in the first two, a bool in ``label``
#     * - :class:`~trl.SFTTrainer`
#       - ``prompt``, ``completion``
#       - messages in both
#     * - :class:`~trl.GRPOTrainer`, :class:`~trl.RLOOTrainer`
#       - ``prompt``
#       - messages
#
# All of them read an unbounded stream and then need ``max_steps``. The rest of the page runs
# ``RewardTrainer`` (4.4) and ``GRPOTrainer`` (4.7).
#
# Part 2: TRL to TorchRL
# ----------------------
#
# 2.1 Wrap a reward model
# ~~~~~~~~~~~~~~~~~~~~~~~
#
# A reward model in the Hugging Face world is a sequence classifier with one output.
# :class:`~torchrl.modules.llm.trl_interop.HFRewardModelWrapper` makes it a TensorDict module
# that reads and writes named entries. Here it wraps the ready-made classifier of courtesy.

classifier = AutoModelForSequenceClassification.from_pretrained(reward_checkpoint).eval()
scorer = HFRewardModelWrapper(classifier, inference_mode=True)
print("reads: ", scorer.in_keys)
print("writes:", scorer.out_keys)

# %%
# Those two keys are where every TorchRL policy leaves its tokens and its attention mask, so
# rollouts fit as they are.
#
# 2.2 Score rollouts
# ~~~~~~~~~~~~~~~~~~
#
# One thing is left to care for. Rollouts of several batches differ in length, and padding them
# to one length uses 0 unless told otherwise, while the classifier finds the last token of a row by
# the tokenizer's pad id. ``score`` gives that id, and the whole page scores through it.


def score(scorer, rollouts):
    """Score rollouts: a float tensor with one reward per row."""
    inputs = TensorDict(batch_size=rollouts.batch_size)
    for key, padding in zip(scorer.in_keys, (tokenizer.pad_token_id, False), strict=True):
        inputs[key] = rollouts.get(key, as_padded_tensor=True, padding_value=padding)
    return scorer(inputs)["reward"]


def score_table(rollouts, scores):
    """Answers with their scores, highest first."""
    table = pd.DataFrame({"answer": answers_of(rollouts), "score": scores.tolist()})
    return table.sort_values("score", ascending=False, ignore_index=True).round(2)


rewards = score(scorer, rollouts)
score_table(rollouts, rewards)

# %%
# The classifier learned to say 1 for courteous and 0 for not, and ranks the policy's answers
# accordingly.
#
# 2.3 The reward is the model's own logit
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The wrapper adds nothing to the score. Called without TorchRL on the same tokens, the model
# gives the same number.

with torch.no_grad():
    logits = classifier(
        input_ids=rollouts["tokens", "full"], attention_mask=rollouts["masks", "all_attention_mask"]
    ).logits[:, 0]
print(f"largest difference between wrapper and bare model: {(rewards - logits).abs().max():.1e}")

# %%
# 2.4 Two switches that stay yours
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The wrapper does not change the model. ``inference_mode=True`` keeps gradients out of the
# reward; the default lets them through. And ``eval()`` is for you to call: a model in train
# mode drops activations at random, if it has dropout, and scores differently each time.

noisy = AutoModelForSequenceClassification.from_pretrained(reward_checkpoint, attention_dropout=0.2)
for training in (True, False):
    noisy.train(training)
    first, second = (score(HFRewardModelWrapper(noisy), rollouts) for _ in range(2))
    print(f"{'train' if training else 'eval'} mode: two scorings differ by up to {(first - second).abs().max():.3f}")
print("gradient with the default:            ", score(HFRewardModelWrapper(classifier), rollouts).requires_grad)
print("gradient with inference_mode=True:    ", rewards.requires_grad)

# %%
# For a reward you want the last line of each pair: ``eval()``, and no gradient, or the policy's
# loss would reach into the reward model.
#
# 2.5 Other keys
# ~~~~~~~~~~~~~~
#
# If your TensorDict names its entries differently, name them in the wrapper.

renamed = HFRewardModelWrapper(
    classifier, token_key="input_ids", attention_mask_key="attention_mask", reward_key="courtesy"
)
batch = TensorDict(
    input_ids=rollouts["tokens", "full"],
    attention_mask=rollouts["masks", "all_attention_mask"],
    batch_size=rollouts.batch_size,
)
print("courtesy of the first rollout:", round(renamed(batch)["courtesy"][0].item(), 4))
print("as scored in 2.2:             ", round(rewards[0].item(), 4))

# %%
# Part 3: Round trip
# ------------------
#
# 3.1 The same tokens on both sides
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A reward model is trained on tokens that TRL makes from messages, and it scores tokens that the
# policy generated. If the two differ, nothing fails; the scores are just worse. So compare them.
# Answers go from ``History`` through a buffer and a dataset into a
# :class:`~trl.RewardTrainer`, which tokenizes them when it is built.
#
# Two details of the way are worth seeing. Lists of messages are stored as such under
# ``set_list_to_stack(True)``, used as a context manager so that the switch does not stay on. And
# they come out of the adapter as a ``NonTensorStack``, which TRL would take for text, so one
# ``map`` at the border makes plain lists of them.


def store(buffer, rows):
    """Add rows, dictionaries of message lists, to a replay buffer."""
    with set_list_to_stack(True):
        buffer.extend(lazy_stack([TensorDict(row) for row in rows]))


def plain_lists(row):
    """What TRL expects in each column: a list of messages."""
    return {name: value.tolist() for name, value in row.items()}


shared_settings = {
    "output_dir": workspace.name,
    "use_cpu": True,
    "bf16": False,
    "activation_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "seed": SEED,
}


def as_pair(chosen, rejected):
    """A preference pair from two rollouts of one prompt."""
    return {
        "prompt": messages(chosen["history", "prompt"]),
        "chosen": messages(chosen["history", "response"]),
        "rejected": messages(rejected["history", "response"]),
    }


pairs = ReplayBuffer(storage=LazyStackStorage(100), sampler=SamplerWithoutReplacement(shuffle=False), batch_size=6)
store(pairs, [as_pair(first, second) for first, second in zip(rollouts[::2], rollouts[1::2], strict=True)])
dataset = TorchRLBufferDataset(pairs, batch_size=6).as_hf_dataset().map(plain_lists)
trainer = RewardTrainer(
    model=classifier,
    args=RewardConfig(**shared_settings),
    train_dataset=Dataset.from_list(list(dataset)),
    processing_class=tokenizer,
)


def generated_ids(rollouts):
    """The token ids of each rollout, without padding."""
    masks = rollouts["masks", "all_attention_mask"]
    return [ids[mask].tolist() for ids, mask in zip(rollouts["tokens", "full"], masks, strict=True)]


trl_ids = [ids for row in trainer.train_dataset for ids in (row["chosen_ids"], row["rejected_ids"])]
rollout_ids = generated_ids(rollouts)
print("rollout's last tokens:", tokenizer.convert_ids_to_tokens(rollout_ids[0][-6:]))
print("TRL's last tokens:    ", tokenizer.convert_ids_to_tokens(trl_ids[0][-6:]))
same = sum(ours == theirs for ours, theirs in zip(rollout_ids, trl_ids, strict=True))
print(f"identical from the first token to the last: {same} of {len(rollout_ids)} answers")

# %%
# System prompt, question, answer and end token are the same ids on both sides.
#
# 3.2 Two ways to lose it
# ~~~~~~~~~~~~~~~~~~~~~~~
#
# An answer that was cut at the length limit has no end token, but its text, put through the
# chat template, gets one. And a template that writes a newline after the answer's end, as ChatML
# templates of real models do, gives training one token more than generation.

(cut,) = make_collector(make_policy(model, max_new_tokens=5), USER_PROMPTS[:1], answers=1)
newline_template = tokenizer.chat_template.replace("{% endgeneration %}", "\n{% endgeneration %}")
for name, ids, history, template in (
    ("cut answer", generated_ids(cut)[0], cut["history", "full"][0], None),
    ("newline in template", rollout_ids[0], rollouts["history", "full"][0], newline_template),
):
    again = tokenizer.apply_chat_template(messages(history), chat_template=template, return_dict=False)
    print(name)
    print("    generated:     ", tokenizer.convert_ids_to_tokens(ids[-4:]))
    print("    from messages: ", tokenizer.convert_ids_to_tokens(again[-4:]))

# %%
# In both cases the classifier, which reads its score off the last token, is trained on one
# token and asked about another. The first is mended by keeping only complete answers, those
# that hold the end token, and the rest of the page does so. For the second, save the tokenizer
# with a template that ends an answer with its end token.


def complete(rollouts):
    """The rollouts whose answer ended by itself."""
    return rollouts[(rollouts["tokens", "response"] == tokenizer.eos_token_id).any(-1)]


print(f"complete: {len(complete(rollouts))} of {len(rollouts)} rollouts, {len(complete(cut))} of {len(cut)} cut ones")

# %%
# Part 4: End to end
# ------------------
#
# 4.1 Collect
# ~~~~~~~~~~~
#
# Every fourth prompt is held out, for the reward model and for the policy. Each prompt gets
# 16 answers.

held_out_prompts = USER_PROMPTS[1::4]
train_prompts = [prompt for prompt in USER_PROMPTS if prompt not in held_out_prompts]
(rollouts,) = make_collector(policy, USER_PROMPTS, answers=16)
collected = len(rollouts)
rollouts = complete(rollouts)
print(f"{collected} rollouts, {len(rollouts)} of them complete")

# %%
# 4.2 Judge
# ~~~~~~~~~
#
# The collector makes rollouts; preferences come from somebody with a taste. Here that is a
# function that likes courtesy. In real work a person or a stronger model stands in its place.


def is_courteous(answer):
    """The judge: likes an answer that opens kindly and does not send the visitor away."""
    return answer.startswith(("Gladly", "Of course", "With pleasure")) and "go away" not in answer


def liked_share(rollouts):
    """The share of answers that the judge likes."""
    return sum(map(is_courteous, answers_of(rollouts))) / len(rollouts)


def make_pairs(rollouts, prompts):
    """Pair each liked answer with a disliked one to the same prompt."""
    by_prompt = defaultdict(lambda: {True: [], False: []})
    for rollout, answer in zip(rollouts.unbind(0), answers_of(rollouts), strict=True):
        by_prompt[rollout["query"]][is_courteous(answer)].append(rollout)
    return [
        as_pair(chosen, rejected)
        for prompt in prompts
        for chosen, rejected in zip(by_prompt[prompt][True], by_prompt[prompt][False], strict=False)
    ]


train_pairs = make_pairs(rollouts, train_prompts)
held_out_pairs = make_pairs(rollouts, held_out_prompts)
print(f"the judge likes {liked_share(rollouts):.0%} of the answers")
print(f"{len(train_pairs)} pairs for training, {len(held_out_pairs)} held out by prompt")
pd.DataFrame([{part: row[part][-1]["content"] for part in row} for row in train_pairs[:36:12]])

# %%
# The two answers of a pair differ in tone, while their lengths are alike.
#
# 4.3 Store the preferences
# ~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A row of the preference buffer has the whole conversational prompt, system message included,
# and the two answers. As in 1.5 the stream is made first and the buffer filled after.

preferences = ReplayBuffer(storage=LazyStackStorage(1000))
preference_stream = (
    TorchRLBufferDataset(preferences, batch_size=16, keys=["prompt", "chosen", "rejected"], num_batches=None)
    .as_hf_dataset()
    .map(plain_lists)
)
store(preferences, train_pairs)
print(f"{len(preferences)} rows; one of them, as TRL gets it:")
for name, conversation in next(iter(preference_stream)).items():
    print(f"{name:>9}: {conversation}")

# %%
# 4.4 Train the reward model
# ~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The reward model starts from the policy's checkpoint with a new, random head.
# :class:`~trl.RewardTrainer` trains it to score the chosen answer above the rejected one.
# ``max_steps`` ends the unbounded stream; ``center_rewards_coefficient`` keeps scores around 0,
# so that their sign has a meaning. The held-out pairs are a fixed dataset: an accuracy on a
# stream would be one on other rows each time.

reward_model = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=1)
trainer = RewardTrainer(
    model=reward_model,
    args=RewardConfig(
        **shared_settings,
        max_steps=80,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=len(held_out_pairs),
        learning_rate=1e-3,
        center_rewards_coefficient=0.01,
        logging_steps=4,
        eval_strategy="steps",
        eval_steps=4,
    ),
    train_dataset=preference_stream,
    eval_dataset=Dataset.from_list(held_out_pairs),
    processing_class=tokenizer,
)
trainer.remove_callback(PrinterCallback)
scorer = HFRewardModelWrapper(reward_model, inference_mode=True)
(new_rollouts,) = make_collector(policy, held_out_prompts, answers=16)
new_rollouts = complete(new_rollouts)

scores_before = score(scorer, new_rollouts)
accuracy_before = trainer.evaluate()["eval_accuracy"]
trainer.train()
accuracy_after = trainer.evaluate()["eval_accuracy"]
reward_model.eval()
print(f"accuracy on held-out prompts: {accuracy_before:.2f} before training, {accuracy_after:.2f} after")

# %%
# A random head guesses; the trained one tells the liked answer from the disliked one on
# prompts that it never saw.


def logged(name):
    """Steps and values of one of the trainer's logged numbers."""
    log = [(entry["step"], entry[name]) for entry in trainer.state.log_history if name in entry]
    return list(zip(*log, strict=True))


figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
figure.suptitle("Training the reward model: loss falls, held-out accuracy rises")
left.plot(*logged("loss"), marker=".", label="training loss")
left.axhline(torch.tensor(2.0).log(), linestyle="--", color="gray", label="guessing (log 2)")
left.set(xlabel="step", ylabel="loss", ylim=(0, None))
right.plot(*logged("eval_accuracy"), marker=".", color="tab:green", label="held-out accuracy")
right.axhline(0.5, linestyle="--", color="gray", label="guessing (0.5)")
right.set(xlabel="step", ylabel="share of pairs ranked right", ylim=(0, 1.05))
for axis in (left, right):
    axis.legend()
plt.show()

# %%
# The loss starts near log 2, that of a coin toss, and both curves settle well before the last
# step.
#
# 4.5 Score new rollouts
# ~~~~~~~~~~~~~~~~~~~~~~
#
# The wrapper around that very model scores answers made after the pairs, to prompts that no pair
# for training came from. ``scores_before`` were the same model's scores of the same answers
# before its training.

scores_after = score(scorer, new_rollouts)
liked = torch.tensor([is_courteous(answer) for answer in answers_of(new_rollouts)])

figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
figure.suptitle("Scores of new answers before and after training: liked and disliked come apart")
for axis, scores, title in zip(axes, (scores_before, scores_after), ("before training", "after training"), strict=True):
    axis.hist([scores[liked], scores[~liked]], bins=20, label=["liked", "disliked"], color=["tab:green", "tab:red"])
    axis.set(title=title, xlabel="score", ylabel="answers")
    axis.legend()
plt.show()

agreement = ((scores_after > 0) == liked).float().mean().item()
print(f"score above 0 exactly where the judge likes the answer: {agreement:.1%} of {len(liked)} answers")

# %%
# Before training the two groups lie on one another; after it, zero parts them. A few answers
# from the whole range:

score_table(new_rollouts, scores_after).iloc[:: len(new_rollouts) // 7]

# %%
# TorchRL's losses read a reward from ``("next", "reward")``, with one dimension for time and
# one for the value behind that of the rows.

new_rollouts["next", "reward"] = scores_after[:, None, None]
print("reward:", tuple(new_rollouts["next", "reward"].shape), "done:", tuple(new_rollouts["next", "done"].shape))

# %%
# 4.6 Improve the policy with TorchRL
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Now the scores get to work. :class:`~torchrl.objectives.llm.GRPOLoss` raises the probability of
# answers that scored above the mean of their prompt's group, an advantage that
# :class:`~torchrl.objectives.llm.MCAdvantage` computes while the buffer is filled. The collector
# calls ``annotate`` on each batch, which adds what the loss needs: the reward, the
# log-probabilities under the policy that sampled, and those under a frozen copy of the first
# policy, the reference. ``kl_to_ref_coeff`` holds the policy near that reference.

loss_policy = TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_output=True)
reference = TransformersWrapper(
    AutoModelForCausalLM.from_pretrained(checkpoint).eval(),
    tokenizer=tokenizer,
    input_mode="tokens",
    generate=False,
    pad_output=True,
)


@torch.no_grad()
def annotate(rollouts):
    """Add log-probabilities and rewards to a batch from the collector."""
    rollouts["log_probs", "full"] = loss_policy(rollouts.copy())["log_probs", "full"]
    rollouts["next", "ref_log_probs", "full"] = reference(rollouts.copy())["log_probs", "full"]
    rollouts["next", "reward"] = score(scorer, rollouts)[:, None, None]
    return rollouts


(before,) = make_collector(policy, held_out_prompts, answers=16)
sampled = before["log_probs", "response"][:, 1:]
recomputed, generated = (
    entry[:, -sampled.shape[-1] :]
    for entry in (annotate(before)["log_probs", "full"], before["masks", "all_attention_mask"])
)
print(f"sampled and recomputed log-probabilities: up to {(sampled - recomputed)[generated].abs().max():.0e} apart")

# %%
# The loss computes for an answer the log-probability that it was drawn with. (The comparison
# leaves out each answer's first token, for which TorchRL 0.14's generating policy reports 0: a
# reason more to let ``annotate`` compute them.)
#
# Each iteration collects 8 answers to each of 6 prompts, takes one step of plain gradient
# descent, and throws the answers away, since they are the old policy's.

grpo_buffer = ReplayBuffer(
    storage=LazyStackStorage(48), sampler=SamplerWithoutReplacement(), batch_size=48, transform=MCAdvantage(grpo_size=8)
)
collector = make_collector(
    policy,
    train_prompts,
    answers=8,
    prompts_per_batch=6,
    batches=16,
    replay_buffer=grpo_buffer,
    postproc=annotate,
)
loss_module = GRPOLoss(loss_policy, entropy_bonus=False, kl_to_ref_coeff=0.05)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

progress = []
for _ in collector:
    for batch in grpo_buffer:
        loss = loss_module(batch)
        (loss.loss_objective + loss.loss_kl_to_ref).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.append((batch["next", "reward"].mean().item(), liked_share(batch)))
    grpo_buffer.empty()

(after,) = make_collector(policy, held_out_prompts, answers=16)
print(f"the judge likes {liked_share(before):.0%} of the answers to held-out prompts before, {liked_share(after):.0%} after")


# %%
# The judge took no part in the training, and these prompts none either: the policy learned the
# judge's taste from the reward model alone.

reward_curve, judge_curve = zip(*progress, strict=True)
figure, left = plt.subplots(figsize=(7, 3.4), layout="constrained")
figure.suptitle("The policy improves: reward and the judge's share rise together")
left.plot(reward_curve, marker=".", color="tab:blue", label="mean reward (left axis)")
left.set(xlabel="iteration", ylabel="reward")
right = left.twinx()
right.plot(judge_curve, marker=".", color="tab:green", label="share that the judge likes (right axis)")
right.set(ylabel="share of answers", ylim=(0, 1.05))
figure.legend(loc="outside lower center", ncols=2)
plt.show()

pd.DataFrame({"before": answers_of(before)[16:22], "after": answers_of(after)[16:22]})

# %%
# Reward and judge rise together, which need not be so: a policy climbs the reward, not the
# judge. Six answers to one held-out prompt, before and after, show what changed: the tone.
#
# How far can the reward model be trusted? Here are answers that no rollout looks like, with
# the reward, the judge's word, and the log-probability that the reference gives them.

probes = [
    "Gladly, the museum is left, enjoy your visit.",
    "Ugh, the museum is left, now go away.",
    "enjoy your visit. enjoy your visit.",
    "pleasure pleasure pleasure pleasure",
    "the course course course",
]
prompt = messages(before["history", "prompt"][0])
encoded = tokenizer.apply_chat_template(
    [[*prompt, {"role": "assistant", "content": probe}] for probe in probes],
    padding=True,
    return_tensors="pt",
    return_dict=True,
    return_assistant_tokens_mask=True,
)
probed = TensorDict(
    tokens=TensorDict(full=encoded["input_ids"]),
    masks=TensorDict(
        all_attention_mask=encoded["attention_mask"].bool(), all_assistant_mask=encoded["assistant_masks"].bool()
    ),
    batch_size=len(probes),
)
annotate(probed)
reference_log_probs = probed["next", "ref_log_probs", "full"].where(probed["masks", "all_assistant_mask"], 0)
pd.DataFrame(
    {
        "answer": probes,
        "judge likes it": [is_courteous(probe) for probe in probes],
        "reward": probed["next", "reward"].flatten().tolist(),
        "log-probability": reference_log_probs.sum(-1).tolist(),
    }
).round(1)

# %%
# The first two rows are answers as in the training pairs, and reward and judge agree on them.
# Below them the reward model may pay for a kind word repeated, which the judge does not like at
# all. No pair ever showed it such text, so nothing taught it better. The last column says
# how to keep a policy from finding out: the reference all but rules these answers out, and the
# KL term charges the policy for going where the reference does not go. With a larger step and
# no KL term this toy can be made to end on such text, its reward rising. The other remedy is more
# pairs, made from what the policy writes now.
#
# 4.7 Improve the policy with TRL
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The same reward model serves :class:`~trl.GRPOTrainer`, which generates its own answers and so
# needs a stream of prompts only, from a buffer like the one in 4.3. The settings are those of 4.6:
# 48 answers a step, 8 to a prompt, sampled from the whole vocabulary.

prompt_buffer = ReplayBuffer(storage=LazyStackStorage(100))
prompt_stream = (
    TorchRLBufferDataset(prompt_buffer, batch_size=6, keys=["prompt"], num_batches=None)
    .as_hf_dataset()
    .map(plain_lists)
)
store(prompt_buffer, [{"prompt": row["prompt"]} for row in train_pairs])

trl_model = AutoModelForCausalLM.from_pretrained(checkpoint)
trainer = GRPOTrainer(
    model=trl_model,
    reward_funcs=reward_model,
    args=GRPOConfig(
        **shared_settings,
        max_steps=16,
        learning_rate=0.2,
        optim="sgd",
        lr_scheduler_type="constant",
        per_device_train_batch_size=48,
        num_generations=8,
        max_completion_length=sampling["max_new_tokens"],
        top_k=0,
        beta=0.0,
    ),
    train_dataset=prompt_stream,
    processing_class=tokenizer,
    reward_processing_classes=tokenizer,
)
trainer.remove_callback(PrinterCallback)
trainer.train()

(trl_after,) = make_collector(make_policy(trl_model.eval()), held_out_prompts, answers=16)
print(f"the judge likes {liked_share(before):.0%} before, {liked_share(trl_after):.0%} after GRPOTrainer")

# %%
# Two libraries, one reward model, and the same judge finds both policies improved.

workspace.cleanup()
