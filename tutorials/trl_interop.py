r"""
.. _trl_interop_tutorial:

From TorchRL rollouts to a TRL reward model and back
====================================================

You have rollouts in TorchRL and want to train on them with TRL's trainers. You have a
reward model from the Hugging Face world and want it inside a TorchRL loop. Two thin
adapters join the libraries, and this page uses both: it ends with a policy that has
improved on the scores of a reward model trained on the policy's own answers.

.. grid:: 1 1 2 2
    :gutter: 3

    .. grid-item-card:: What you will learn

        * Stream a TorchRL replay buffer into a TRL trainer, prompt included
        * Make preference pairs from real rollouts and train a reward model on them
        * Score TorchRL rollouts with a Hugging Face reward model
        * Check that both libraries see the very same tokens
        * Improve the policy against the reward model, with TorchRL and with TRL

    .. grid-item-card:: Prerequisites

        * Familiarity with one of the two: TorchRL's collectors and buffers, or TRL's
          trainers
        * Python 3.11 and two CPU cores; once the packages are there, no network
        * ``pip install torch torchrl tensordict trl transformers datasets matplotlib``

.. figure:: /_static/dataflow.svg
    :alt: A policy generates rollouts, a judge turns them into preference pairs in a
        replay buffer, TorchRLBufferDataset feeds them to RewardTrainer, and
        HFRewardModelWrapper brings the trained reward model back to score new
        rollouts that improve the policy.

    The journey; Part 4 goes the whole way round.
"""

# %%
# Everything is seeded, so that two runs on one machine print the same numbers. Models
# are written to a folder that the last cell removes; only empty lock files stay behind,
# in the cache of ``datasets``.

import math
import tempfile
from collections import defaultdict
from importlib.metadata import version
from itertools import islice, product
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from datasets import Dataset
from tensordict import TensorDict, lazy_stack, set_list_to_stack
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import InitTracker, StepCounter
from torchrl.envs.llm import DatasetChatEnv
from torchrl.modules.llm import (
    HFRewardModelWrapper,
    TorchRLBufferDataset,
    TransformersWrapper,
)
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

workspace = tempfile.TemporaryDirectory(prefix="toy-")

for name in ("torch", "torchrl", "tensordict", "trl", "transformers", "datasets"):
    print(f"{name:<13}{version(name)}")

# %%
# The page ran on these versions. Its task: visitors to a town ask for directions.

SYSTEM_PROMPT = "You show visitors the way."
QUESTIONS = (
    "Where is the {}?",
    "How do I get to the {} from here?",
    "Sorry, I am new in town, can you tell me the way to the {}?",
)
PLACES = (
    "museum station harbour market library bakery theatre garden castle bridge".split()
)
USER_PROMPTS = [question.format(place) for place, question in product(PLACES, QUESTIONS)]

print(f"{len(USER_PROMPTS)} prompts, such as:")
print(*USER_PROMPTS[:3], sep="\n")

# %%
# Each of ten places is asked for in three ways, of different lengths.
#
# .. admonition:: Boilerplate that you may skip
#
#     With no network there is no model to download, so the next cell makes a toy one: a
#     tokenizer, and a two-layer Llama warmed up for a few seconds on templated answers,
#     courteous and rude ones. It also makes a small classifier of courtesy, such as you
#     may find ready-made. Both are saved to disk, and the rest of the page knows only the
#     names ``checkpoint`` and ``reward_checkpoint``. To use real models, replace the
#     whole cell by these two names, as in ``checkpoint = "org/name"``. The two models
#     must share one tokenizer, since token ids pass from one to the other.


def toy_conversations():
    """Every question with every answer, and 1.0 where the answer is courteous."""
    courteous = ("Gladly", "Of course", "With pleasure")
    rude = ("Ugh", "Not again", "Listen", "What now", "Oh no")
    ways = ("left", "right", "straight on")
    closings = ("it is not far", "follow the signs", "mind the steps")
    for place, question, opening, way, closing in product(
        PLACES, QUESTIONS, courteous + rude, ways, closings
    ):
        answer = f"{opening}, the {place} is {way}, {closing}."
        messages = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": question.format(place)},
            {"role": "assistant", "content": answer},
        ]
        yield messages, float(opening in courteous)


def toy_tokenizer(texts):
    """A byte-level BPE tokenizer whose template puts nothing after an answer's end."""
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
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=template,
    )


def fit(model, inputs, labels, *, lr, steps):
    """Train a model on random batches of 32 rows."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(steps):
        rows = torch.randint(len(labels), (32,))
        model(
            **{name: rowwise[rows] for name, rowwise in inputs.items()},
            labels=labels[rows],
        ).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


checkpoint = str(Path(workspace.name) / "policy")
reward_checkpoint = str(Path(workspace.name) / "reward")

conversations, courtesy = zip(*toy_conversations(), strict=True)
tokenizer = toy_tokenizer(
    message["content"] for messages in conversations for message in messages
)
encoded = tokenizer.apply_chat_template(
    list(conversations),
    padding=True,
    return_tensors="pt",
    return_dict=True,
    return_assistant_tokens_mask=True,
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
answer_ids = encoded["input_ids"].where(answer_mask, -100)
fit(language_model, encoded, answer_ids, lr=3e-3, steps=300)
language_model.save_pretrained(checkpoint)
tokenizer.save_pretrained(checkpoint)

classifier = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=1)
fit(classifier, encoded, torch.tensor(courtesy), lr=1e-3, steps=100)
classifier.save_pretrained(reward_checkpoint)

# %%
# Part 1: TorchRL to TRL
# ----------------------
#
# 1.1 Collect rollouts
# ~~~~~~~~~~~~~~~~~~~~
#
# A TorchRL language environment hands out prompts, a policy answers them, and a
# collector runs the two. :class:`~torchrl.modules.llm.TransformersWrapper` turns a
# Hugging Face model into such a policy. Two settings matter later. ``pad_output=True``
# gives one tensor of tokens for answers of different lengths. And sampling is from the
# model's whole distribution: Hugging Face takes only the 50 likeliest tokens unless told
# otherwise, and the probabilities that a policy gradient needs would then not be those
# that sampled.
#
# The environment gets a system prompt and user prompts of three lengths, and repeats
# each prompt to get several answers to it, side by side. For conversations, tensordict
# must store a list with one entry per row, as a stack. That is a setting of the whole
# process; ``set_list_to_stack(True)`` as a decorator turns it on for as long as
# ``collect`` runs.

tokenizer = AutoTokenizer.from_pretrained(checkpoint)
model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
sampling = {
    "do_sample": True,
    "temperature": 1.0,
    "top_k": len(tokenizer),
    "max_new_tokens": 20,
}


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


def make_collector(
    policy, prompts, *, answers, batches=1, prompts_per_batch=None, **kwargs
):
    """Collect answers to prompts, to all of them or to the next few in each batch."""
    rows = (prompts_per_batch or len(prompts)) * answers
    env = DatasetChatEnv.from_dataloader(
        DataLoader(
            [{"query": prompt} for prompt in prompts],
            shuffle=prompts_per_batch is not None,
        ),
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


@set_list_to_stack(True)
def collect(policy, prompts, *, answers):
    """Collect one batch of rollouts: so many answers to each prompt."""
    (rollouts,) = make_collector(policy, prompts, answers=answers)
    return rollouts


policy = make_policy(model)
rollouts = collect(policy, USER_PROMPTS[:3], answers=4)
print("rollouts:", len(rollouts))
for key in ("query", ("tokens", "full"), ("masks", "all_attention_mask")):
    entry = rollouts.get(key)
    print(f"{key!s:<32}{type(entry).__name__:<16}{tuple(entry.shape)}")

# %%
# One batch of 3 prompts with 4 answers each, padded to one length.
#
# 1.2 Read a conversation
# ~~~~~~~~~~~~~~~~~~~~~~~
#
# A rollout holds its conversation twice: as tokens, which is what the model saw, and as
# :class:`~torchrl.data.llm.History`, which is what was said. ``History`` is TorchRL's
# counterpart of the list of messages that TRL and ``transformers`` use:
# ``("history", "prompt")`` is what the policy was given, ``("history", "response")`` its
# answer, and ``("history", "full")`` both. ``messages`` reads it, under that setting.


@set_list_to_stack(True)
def messages(rollouts, part):
    """Turn a part of each rollout's History into a list of role/content dictionaries."""
    return [
        [{"role": turn.role, "content": turn.content} for turn in history.unbind(0)]
        for history in rollouts["history", part].unbind(0)
    ]


def answers_of(rollouts):
    """The text of each rollout's answer."""
    return [conversation[-1]["content"] for conversation in messages(rollouts, "full")]


for message in messages(rollouts, "full")[0]:
    print(f"{message['role']:>9}: {message['content']}")
print()
questions_and_answers = zip(rollouts["query"], answers_of(rollouts), strict=True)
for prompt, answer in islice(questions_and_answers, 0, None, 3):
    print(f"{prompt}\n    {answer}")

# %%
# Sentences of mixed quality, some kind and some rude: a policy with room to improve.
#
# 1.3 Look into a buffer as TRL would
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# :class:`~torchrl.modules.llm.TorchRLBufferDataset` draws batches from a
# :class:`~torchrl.data.ReplayBuffer` and yields single rows as dictionaries.
# ``keys=`` selects what a row has, and a nested key becomes a dotted name, since a
# dataset's columns have no levels.

buffer = ReplayBuffer(storage=LazyStackStorage(100))
buffer.extend(rollouts.select("query", "tokens", "masks"))
every_key = TorchRLBufferDataset(buffer, batch_size=4)
print("without keys=:", *next(iter(every_key)))
selected = TorchRLBufferDataset(buffer, batch_size=4, keys=["query", ("tokens", "full")])
for name, value in next(iter(selected)).items():
    print(f"with keys=: {name:<12} {type(value).__name__}")

# %%
# A string stays a string and tokens stay a tensor. Without ``keys=`` the row has all
# that the buffer stores, whole groups like ``tokens`` next to their members, which no
# trainer wants; so name what you need.
#
# 1.4 Finite or unbounded
# ~~~~~~~~~~~~~~~~~~~~~~~
#
# The adapter samples, so its length is your choice: ``num_batches`` replay batches for
# each pass, or no end with ``num_batches=None``.

for num_batches in (1, 3):
    finite = TorchRLBufferDataset(
        buffer, batch_size=4, keys=["query"], num_batches=num_batches
    )
    print(f"num_batches={num_batches}: {len(list(finite))} rows")
endless = TorchRLBufferDataset(buffer, batch_size=4, keys=["query"], num_batches=None)
print(f"num_batches=None: {len(list(islice(endless, 1000)))} rows, stopped by us")

# %%
# A thousand rows came out of a buffer of twelve: an unbounded stream repeats rows, and
# the trainer must bring its own end (``max_steps``).
#
# 1.5 Hand it to TRL, live
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# TRL's trainers take datasets of the ``datasets`` library, and ``as_hf_dataset()`` makes
# one, a :class:`datasets.IterableDataset`. It stays connected to the buffer, so wrap the
# buffer while it is empty and fill it later. That is also the fast order: ``datasets``
# pickles what it wraps to fingerprint it, and a full buffer is a lot to pickle.

live = ReplayBuffer(storage=LazyStackStorage(100))
stream = TorchRLBufferDataset(
    live, batch_size=1, keys=["query"], num_batches=None
).as_hf_dataset()
live.extend(rollouts[:1].select("query"))
print("one row: ", sorted({row["query"] for row in stream.take(50)}))
live.extend(rollouts[-1:].select("query"))
print("two rows:", sorted({row["query"] for row in stream.take(50)}))

# %%
# The second line shows a prompt that was not in the buffer when the stream was made.
#
# 1.6 What each trainer wants
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A buffer row needs the columns of the trainer that will read it. A conversational
# column is a list of messages, to which the trainer applies the tokenizer's chat
# template itself.
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
# All of them read an unbounded stream and then need ``max_steps``. The rest of the page
# runs ``RewardTrainer`` (4.4) and ``GRPOTrainer`` (4.7); the page on data contracts has
# more on each, and its tests run all six.
#
# Part 2: TRL to TorchRL
# ----------------------
#
# 2.1 Wrap a reward model
# ~~~~~~~~~~~~~~~~~~~~~~~
#
# A reward model in the Hugging Face world is a sequence classifier with one output.
# :class:`~torchrl.modules.llm.HFRewardModelWrapper` makes it a TensorDict module that
# reads and writes named entries. Here it wraps the ready-made classifier of courtesy.

classifier = AutoModelForSequenceClassification.from_pretrained(reward_checkpoint).eval()
scorer = HFRewardModelWrapper(classifier, inference_mode=True)
print("reads: ", scorer.in_keys)
print("writes:", scorer.out_keys)

# %%
# Those two keys are where every TorchRL policy leaves its tokens and its attention
# mask, so rollouts fit as they are.
#
# 2.2 Score rollouts
# ~~~~~~~~~~~~~~~~~~
#
# One detail remains. Rollouts of several batches differ in length, and
# padding them to one length uses 0 unless told otherwise, while the classifier finds
# the last token of a row by the tokenizer's pad id. ``score`` gives that id, and the
# whole page scores through it.


def score(scorer, rollouts):
    """Score rollouts: a float tensor with one reward per row."""
    inputs = TensorDict(batch_size=rollouts.batch_size)
    for key, padding in zip(scorer.in_keys, (tokenizer.pad_token_id, False), strict=True):
        inputs[key] = rollouts.get(key, as_padded_tensor=True, padding_value=padding)
    return scorer(inputs)["reward"]


def ranked(rollouts, scores):
    """Scores and answers, highest score first."""
    return sorted(zip(scores.tolist(), answers_of(rollouts), strict=True), reverse=True)


rewards = score(scorer, rollouts)
for reward, answer in ranked(rollouts, rewards):
    print(f"{reward:6.2f}  {answer}")

# %%
# The classifier learned to say 1 for courteous and 0 for not, and ranks the policy's
# answers accordingly.
#
# 2.3 The reward is the model's own logit
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The wrapper adds nothing to the score. Called without TorchRL on the same tokens, the
# model gives the same number.

with torch.no_grad():
    logits = classifier(
        input_ids=rollouts["tokens", "full"],
        attention_mask=rollouts["masks", "all_attention_mask"],
    ).logits[:, 0]
difference = (rewards - logits).abs().max()
print(f"largest difference between wrapper and bare model: {difference:.1e}")

# %%
# The two agree, so a reward in TorchRL is the logit and nothing else.
#
# 2.4 Two switches that stay yours
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The wrapper does not change the model. ``inference_mode=True`` keeps gradients out of
# the reward; the default lets them through. And ``eval()`` is for you to call: a model
# in train mode drops activations at random, if it has dropout, and scores differently
# each time.

noisy = AutoModelForSequenceClassification.from_pretrained(
    reward_checkpoint, attention_dropout=0.2
)
for training in (True, False):
    noisy.train(training)
    first, second = (score(HFRewardModelWrapper(noisy), rollouts) for _ in range(2))
    mode, difference = "train" if training else "eval", (first - second).abs().max()
    print(f"{mode:>5} mode: two scorings differ by up to {difference:.3f}")
with_gradient = score(HFRewardModelWrapper(classifier), rollouts)
print("gradient with the default:        ", with_gradient.requires_grad)
print("gradient with inference_mode=True:", rewards.requires_grad)

# %%
# For a reward you want the last line of each pair: ``eval()``, and no gradient, or the
# policy's loss would reach into the reward model.
#
# 2.5 Other keys
# ~~~~~~~~~~~~~~
#
# If your TensorDict names its entries differently, name them in the wrapper.

renamed = HFRewardModelWrapper(
    classifier,
    token_key="input_ids",
    attention_mask_key="attention_mask",
    reward_key="courtesy",
)
batch = TensorDict(
    input_ids=rollouts["tokens", "full"],
    attention_mask=rollouts["masks", "all_attention_mask"],
    batch_size=rollouts.batch_size,
)
print("courtesy of the first rollout:", round(renamed(batch)["courtesy"][0].item(), 4))
print("as scored in 2.2:             ", round(rewards[0].item(), 4))

# %%
# The same model on the same tokens gives the same score under other names.
#
# Part 3: Round trip
# ------------------
#
# 3.1 The same tokens on both sides
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A reward model is trained on tokens that TRL makes from messages, and it scores tokens
# that the policy generated. If the two differ, no error says so. So compare them. Answers
# go from ``History`` through a buffer and a dataset into a :class:`~trl.RewardTrainer`,
# which tokenizes them when it is built; it is not run here, and which answer is called
# chosen does not matter. The buffer's sampler keeps the order of the rows.
#
# Two details of the way matter. Lists of messages, too, need ``set_list_to_stack(True)``
# to be stored, here as a context manager. And they come out of the adapter as a
# ``NonTensorStack``, which TRL would take for text, so one ``map`` at the border makes
# plain lists of them.


def store(buffer, rows):
    """Add rows, dictionaries of message lists, to a replay buffer."""
    with set_list_to_stack(True):
        buffer.extend(lazy_stack([TensorDict(row) for row in rows]))


def plain_lists(row):
    """What TRL expects in each column: a list of messages."""
    return {name: value.tolist() for name, value in row.items()}


def trl_dataset(buffer, keys, *, batch_size, num_batches):
    """Stream a buffer of message lists into the form that TRL's trainers take."""
    adapter = TorchRLBufferDataset(
        buffer, batch_size=batch_size, keys=keys, num_batches=num_batches
    )
    return adapter.as_hf_dataset().map(plain_lists)


PAIR = ["prompt", "chosen", "rejected"]
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


pairs = ReplayBuffer(
    storage=LazyStackStorage(100),
    sampler=SamplerWithoutReplacement(shuffle=False),
    batch_size=6,
)
prompts, responses = messages(rollouts, "prompt"), messages(rollouts, "response")
rows = zip(prompts[::2], responses[::2], responses[1::2], strict=True)
store(pairs, [dict(zip(PAIR, row, strict=True)) for row in rows])
dataset = trl_dataset(pairs, PAIR, batch_size=6, num_batches=1)
trainer = RewardTrainer(
    model=classifier,
    args=RewardConfig(**shared_settings),
    train_dataset=Dataset.from_list(list(dataset)),
    processing_class=tokenizer,
)


def generated_ids(rollouts):
    """The token ids of each rollout, without padding."""
    masks = rollouts["masks", "all_attention_mask"]
    return [
        ids[mask].tolist()
        for ids, mask in zip(rollouts["tokens", "full"], masks, strict=True)
    ]


trl_ids = [
    ids
    for row in trainer.train_dataset
    for ids in (row["chosen_ids"], row["rejected_ids"])
]
rollout_ids = generated_ids(rollouts)
print("rollout's last tokens:", tokenizer.convert_ids_to_tokens(rollout_ids[0][-6:]))
print("TRL's last tokens:    ", tokenizer.convert_ids_to_tokens(trl_ids[0][-6:]))
matching = [ours == theirs for ours, theirs in zip(rollout_ids, trl_ids, strict=True)]
print(f"identical from first to last token: {sum(matching)} of {len(matching)} answers")

# %%
# System prompt, question, answer and end token are the same ids on both sides. (``Ġ``
# stands for a space in front.) If an answer is missing from the count, the next step says
# why.
#
# 3.2 How the match is lost
# ~~~~~~~~~~~~~~~~~~~~~~~~~
#
# An answer that was cut at the length limit has no end token, but its text, put through
# the chat template, gets one. And a template that writes a newline after the answer's
# end, as ChatML templates of real models do, gives training one token more than
# generation. Here are the last tokens of both forms, with the classifier's score.

cut = collect(make_policy(model, max_new_tokens=5), USER_PROMPTS[:1], answers=1)
newline_template = tokenizer.chat_template.replace(
    "{% endgeneration %}", "\n{% endgeneration %}"
)
for name, rollout, template in (
    ("cut answer", cut[:1], tokenizer.chat_template),
    ("newline in template", rollouts[:1], newline_template),
):
    (ids,) = generated_ids(rollout)
    (conversation,) = messages(rollout, "full")
    again = tokenizer.apply_chat_template(
        conversation, chat_template=template, return_dict=False
    )
    print(name)
    for origin, tokens in (("generated", ids), ("from messages", again)):
        reward = classifier(torch.tensor([tokens])).logits.item()
        last_tokens = tokenizer.convert_ids_to_tokens(tokens[-4:])
        print(f"    {origin:<13} {reward:6.2f}  {last_tokens}")

# %%
# In both cases the classifier, which reads its score off the last token, is trained on
# one token and asked about another. The scores have little in common: with a newline
# (``Ċ``) at its end, a rude answer passes for a courteous one. There is a third way: a
# sampled answer may spell a word with other tokens than the tokenizer would. One test
# finds all three.


def survives(rollouts):
    """Whether each rollout's tokens come back from its messages, as a bool tensor."""
    again = tokenizer.apply_chat_template(messages(rollouts, "full"), return_dict=False)
    pairs = zip(generated_ids(rollouts), again, strict=True)
    return torch.tensor([ids == ids_again for ids, ids_again in pairs])


surviving = survives(rollouts)
print(f"of the {len(rollouts)} rollouts of Part 1, {surviving.sum()} survive")
print(f"of the cut one, {survives(cut).sum()}")

# %%
# The test agrees with TRL's count in 3.1, and the pairs of Part 4 are made only from what
# passes it. If nothing passes, look at the template: save the tokenizer with one that
# ends an answer with its end token.
#
# Part 4: End to end
# ------------------
#
# 4.1 Collect
# ~~~~~~~~~~~
#
# Every fourth prompt is held out from here on, from the reward model's training and from
# the policy's. Each prompt gets 16 answers.

held_out_prompts = USER_PROMPTS[1::4]
train_prompts = [prompt for prompt in USER_PROMPTS if prompt not in held_out_prompts]
rollouts = collect(policy, USER_PROMPTS, answers=16)
survivors = survives(rollouts)
ended = (rollouts["tokens", "response"] == tokenizer.eos_token_id).any(-1)
print(f"{len(rollouts)} rollouts: {ended.sum()} ended, {survivors.sum()} survive")
rollouts = rollouts[survivors]

# %%
# The few that did not end were cut; those that ended and do not survive are spelled in
# other tokens.
#
# 4.2 Judge
# ~~~~~~~~~
#
# The collector makes rollouts; preferences come from somebody with a taste. Here that
# is a function that likes courtesy. In real work a person or a stronger model stands in
# its place.


def is_courteous(answer):
    """The judge: likes an answer that opens with a courtesy."""
    return answer.startswith(("Gladly", "Of course", "With pleasure"))


def liked_share(rollouts):
    """The share of answers that the judge likes."""
    return sum(map(is_courteous, answers_of(rollouts))) / len(rollouts)


def make_pairs(rollouts, prompts):
    """Pair each liked answer with a disliked one to the same prompt."""
    liked, disliked = defaultdict(list), defaultdict(list)
    conversations = zip(
        messages(rollouts, "prompt"), messages(rollouts, "response"), strict=True
    )
    for prompt, response in conversations:
        by_prompt = liked if is_courteous(response[0]["content"]) else disliked
        by_prompt[prompt[-1]["content"]].append((prompt, response))
    return [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        for user_prompt in prompts
        for (prompt, chosen), (_, rejected) in zip(
            liked[user_prompt], disliked[user_prompt], strict=False
        )
    ]


train_pairs = make_pairs(rollouts, train_prompts)
held_out_pairs = make_pairs(rollouts, held_out_prompts)
print(f"the judge likes {liked_share(rollouts):.0%} of the answers")
print(f"{len(train_pairs)} pairs for training, {len(held_out_pairs)} held out by prompt")
for pair in train_pairs[:36:12]:
    print()
    for part, conversation in pair.items():
        print(f"{part:>9}: {conversation[-1]['content']}")
print()
for part in ("chosen", "rejected"):
    words = sum(len(pair[part][0]["content"].split()) for pair in train_pairs)
    print(f"{part:>9}: {words / len(train_pairs):.1f} words on average")

# %%
# Fewer than half of the answers are liked, and each liked one makes at most one pair. The
# two answers of a pair differ in tone, and otherwise by chance; their lengths are alike,
# so that there is no telling them apart by length.
#
# 4.3 Store the preferences
# ~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A row of the preference buffer has the whole conversational prompt, system message
# included, and the two answers. As in 1.5 the stream is made first and the buffer
# filled after.

preferences = ReplayBuffer(storage=LazyStackStorage(1000))
preference_stream = trl_dataset(preferences, PAIR, batch_size=16, num_batches=None)
store(preferences, train_pairs)
print(f"{len(preferences)} rows; one of them, as TRL gets it:")
for name, conversation in next(iter(preference_stream)).items():
    print(f"{name:>9}: {conversation}")

# %%
# Each column is a list of messages, the system message among them.
#
# 4.4 Train the reward model
# ~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The reward model starts from the policy's checkpoint with a new, random head.
# :class:`~trl.RewardTrainer` trains it to score the chosen answer above the rejected
# one. ``max_steps`` ends the unbounded stream; ``center_rewards_coefficient`` keeps
# scores around 0, so that their sign has a meaning. The held-out pairs are a fixed
# dataset; on a stream, each evaluation would use other rows. For the comparison in 4.5,
# new answers to the held-out prompts are collected and scored before the training.

reward_model = AutoModelForSequenceClassification.from_pretrained(
    checkpoint, num_labels=1
)
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
new_rollouts = collect(policy, held_out_prompts, answers=16)

scores_before = score(scorer, new_rollouts)
accuracy_before = trainer.evaluate()["eval_accuracy"]
trainer.train()
accuracy_after = trainer.evaluate()["eval_accuracy"]
reward_model.eval()
print(f"accuracy on held-out prompts: {accuracy_before:.2f}, then {accuracy_after:.2f}")

# %%
# A random head does about as well as a coin; the trained one tells the liked answer from
# the disliked one on prompts that no pair for training came from.


def logged(name):
    """Steps and values of one of the trainer's logged numbers."""
    history = [entry for entry in trainer.state.log_history if name in entry]
    return [entry["step"] for entry in history], [entry[name] for entry in history]


figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
figure.suptitle("Training the reward model: loss falls, held-out accuracy rises")
left.plot(*logged("loss"), ".-", label="training loss")
left.axhline(math.log(2), linestyle="--", color="gray", label="guessing (log 2)")
left.set(xlabel="step", ylabel="loss", ylim=(0, None))
right.plot(*logged("eval_accuracy"), ".-", color="tab:green", label="held-out accuracy")
right.axhline(0.5, linestyle="--", color="gray", label="guessing (0.5)")
right.set(xlabel="step", ylabel="share of pairs ranked right", ylim=(0, 1.05))
left.legend()
right.legend()
plt.show()

# %%
# The loss starts near log 2, that of a coin toss, and both curves settle well before
# the last step.
#
# 4.5 Score new rollouts
# ~~~~~~~~~~~~~~~~~~~~~~
#
# The wrapper around that very model scores the new answers again. ``scores_before`` were
# the same model's scores of the same answers before its training.

scores_after = score(scorer, new_rollouts)
liked = torch.tensor([is_courteous(answer) for answer in answers_of(new_rollouts)])

figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
figure.suptitle("Scores of new answers: training moves liked and disliked apart")
for axis, scores in zip(axes, (scores_before, scores_after), strict=True):
    axis.hist([scores[liked], scores[~liked]], bins=20, color=["tab:green", "tab:red"])
    axis.legend(["liked by the judge", "disliked"], loc="upper center")
    axis.set(xlabel="score", ylabel="answers")
axes[0].set_title("before training")
axes[1].set_title("after training")
plt.show()

agreement = ((scores_after > 0) == liked).float().mean().item()
print(f"score and judge agree on {agreement:.1%} of {len(liked)} answers")

# %%
# Before training the two groups overlap; after it, zero separates them. Here are a few
# answers from the whole range. The toy policy garbles some.

for reward, answer in ranked(new_rollouts, scores_after)[:: len(new_rollouts) // 7]:
    print(f"{reward:6.2f}  {answer}")

# %%
# TorchRL's losses read a reward from ``("next", "reward")``. For language models it has
# two dimensions of size 1 behind that of the rows, one to spread over the tokens and one
# for the value.

new_rollouts["next", "reward"] = scores_after[:, None, None]
print("tokens:", tuple(new_rollouts["tokens", "full"].shape))
print("reward:", tuple(new_rollouts["next", "reward"].shape))

# %%
# There is one reward for an answer, however many tokens it has.
#
# 4.6 Improve the policy with TorchRL
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Now the scores get to work. :class:`~torchrl.objectives.llm.GRPOLoss` raises the
# probability of answers that scored above the mean of their prompt's group, an advantage
# that :class:`~torchrl.objectives.llm.MCAdvantage` computes while the buffer is filled.
# The collector calls ``annotate`` on each batch, which adds what the loss needs: the
# reward, the log-probabilities under the policy that sampled, and those under a frozen
# copy of the first policy, the reference, from which ``kl_to_ref_coeff`` lets the policy
# stray only so far.
#
# The reward is the score, clipped. Advantages are measured in standard deviations of the
# group, so where all its answers are good, 2.82 against 2.81 would count as much as good
# against bad. Clipped, both are 1.

token_mode = {"tokenizer": tokenizer, "input_mode": "tokens", "pad_output": True}
loss_policy = TransformersWrapper(model, generate=False, **token_mode)
first_model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
reference = TransformersWrapper(first_model, generate=False, **token_mode)


def reward_of(rollouts):
    """The reward model's score, clipped to -1 and 1."""
    return score(scorer, rollouts).clamp(-1, 1)


@torch.no_grad()
def log_probs_of(policy, rollouts):
    """The log-probability of each token under a policy."""
    return policy(rollouts.select("tokens", "masks"))["log_probs", "full"]


@set_list_to_stack(True)
def annotate(rollouts):
    """Add log-probabilities and rewards to a batch from the collector."""
    rollouts["log_probs", "full"] = log_probs_of(loss_policy, rollouts)
    rollouts["next", "ref_log_probs", "full"] = log_probs_of(reference, rollouts)
    rollouts["next", "reward"] = reward_of(rollouts)[:, None, None]
    return rollouts


sampled = new_rollouts["log_probs", "response"][:, 1:]
answer_tokens = slice(-sampled.shape[-1], None)
differences = sampled - log_probs_of(loss_policy, new_rollouts)[:, answer_tokens]
generated = new_rollouts["masks", "all_attention_mask"][:, answer_tokens]
print(f"sampled and recomputed differ by up to {differences[generated].abs().max():.0e}")

# %%
# But for rounding, the policy in the loss gives each token the log-probability that it
# was sampled with. (The comparison leaves out each answer's first token, for which
# TorchRL 0.14's generating policy reports 0: one more reason to let ``annotate`` compute
# them.)
#
# Each iteration collects 8 answers to each of 4 prompts, takes one step of plain
# gradient descent, and throws the answers away, since they are the old policy's. With a
# ``replay_buffer`` the collector fills that buffer instead of handing batches out; its 32
# rows make one batch. And the collector's ``policy`` holds the same ``model`` as
# ``loss_policy``, so it samples from the new weights at once.

grpo_buffer = ReplayBuffer(
    storage=LazyStackStorage(32),
    sampler=SamplerWithoutReplacement(),
    batch_size=32,
    transform=MCAdvantage(grpo_size=8),
)
loss_module = GRPOLoss(loss_policy, entropy_bonus=False, kl_to_ref_coeff=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
progress = []

with set_list_to_stack(True):
    for _ in make_collector(
        policy,
        train_prompts,
        answers=8,
        prompts_per_batch=4,
        batches=24,
        replay_buffer=grpo_buffer,
        postproc=annotate,
    ):
        (batch,) = grpo_buffer
        loss = loss_module(batch)
        (loss.loss_objective + loss.loss_kl_to_ref).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.append((batch["next", "reward"].mean().item(), liked_share(batch)))
        grpo_buffer.empty()

after = collect(policy, held_out_prompts, answers=16)
share_before, share_after = liked_share(new_rollouts), liked_share(after)
print(f"on held-out prompts the judge likes {share_before:.0%}, then {share_after:.0%}")

# %%
# The judge took no part in the policy's training, nor did these prompts: the policy
# learned the judge's taste from the reward model alone. Was the reward a good guide all
# the way?

reward_curve, judge_curve = zip(*progress, strict=True)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
figure.suptitle("The policy improves: reward and the judge's share rise together")
left.plot(reward_curve, ".-")
left.set(xlabel="iteration", ylabel="mean reward", ylim=(-1.05, 1.05))
right.plot(judge_curve, ".-", color="tab:green")
right.set(xlabel="iteration", ylabel="share of answers liked", ylim=(0, 1.05))
plt.show()

print(new_rollouts["query"][0])
for name, answered in (("before", new_rollouts), ("after", after)):
    print(f"\n{name}")
    answers = answers_of(answered)
    for answer in answers[:6]:
        print(f"    {answer}")
    print(f"    ... {len(set(answers))} different among {len(answers)}")

# %%
# It was: reward and judge rise together, and the answers to one held-out prompt show the
# change of tone. The last line of each list, over all held-out prompts, shows the price:
# variety shrank, which neither reward nor judge counts.
#
# A policy climbs the reward, not the judge, and the reward can be fooled. Here are two
# answers like those in the pairs and four that are not, with the reward, the judge's
# word, and the log-probability that the reference gives them.


def as_rollouts(conversations):
    """Tokenize conversations into the entries that a rollout has."""
    encoded = tokenizer.apply_chat_template(
        conversations,
        padding=True,
        return_tensors="pt",
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return TensorDict(
        tokens=TensorDict(full=encoded["input_ids"]),
        masks=TensorDict(
            all_attention_mask=encoded["attention_mask"].bool(),
            all_assistant_mask=encoded["assistant_masks"].bool(),
        ),
        batch_size=len(conversations),
    )


probes = [
    "Gladly, the museum is left, follow the signs.",
    "Ugh, the museum is left, follow the signs.",
    "pleasure pleasure pleasure pleasure",
    "the course course course",
    "Ugh, with pleasure, of course, gladly.",
    "follow the signs. follow the signs.",
]
prompt = messages(new_rollouts, "prompt")[0]
probed = as_rollouts(
    [[*prompt, {"role": "assistant", "content": probe}] for probe in probes]
)
answer_mask = probed["masks", "all_assistant_mask"]
log_probs = log_probs_of(reference, probed).where(answer_mask, 0).sum(-1)
print("reward  judge  log-probability  answer")
for reward, log_prob, probe in zip(reward_of(probed), log_probs, probes, strict=True):
    judge = "likes" if is_courteous(probe) else "-"
    print(f"{reward:6.1f}  {judge:<5}  {log_prob:15.1f}  {probe}")

# %%
# On the first two rows reward and judge agree. On kind words strung together they do not:
# no pair taught the reward model better, and it pays for them as for a courteous
# sentence; only the last row, with no kind word, goes unpaid. A policy that found such
# text would be paid for nonsense. Clipping sees to it that it is not paid more. The KL
# term uses what the third column shows: to the reference these answers are next to
# impossible, and straying from the reference is penalized. The lasting cure is more
# pairs, made from what the policy writes now.
#
# 4.7 Improve the policy with TRL
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The same reward serves :class:`~trl.GRPOTrainer`. It generates its own answers, and so
# needs a stream of prompts only, from a buffer like the one in 4.3; and it calls its
# reward function with messages, which ``as_rollouts`` brings to where ``reward_of``
# reads. The settings are those of 4.6 by TRL's names: 32 answers a step, 8 to a prompt,
# sampled from the whole vocabulary (``top_k=0``), and ``beta`` for the KL term. In
# scoring, one thing differs: made from messages, a cut answer gets an end token (3.2),
# and is scored as if it had ended.


def trl_reward(prompts, completions, **kwargs):
    """The reward of 4.6, in the form that GRPOTrainer calls: lists of messages in."""
    conversations = [
        prompt + completion
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    return reward_of(as_rollouts(conversations)).tolist()


prompt_buffer = ReplayBuffer(storage=LazyStackStorage(100))
prompt_stream = trl_dataset(prompt_buffer, ["prompt"], batch_size=4, num_batches=None)
store(prompt_buffer, [{"prompt": row["prompt"]} for row in train_pairs])

trl_model = AutoModelForCausalLM.from_pretrained(checkpoint)
trainer = GRPOTrainer(
    model=trl_model,
    reward_funcs=trl_reward,
    args=GRPOConfig(
        **shared_settings,
        max_steps=24,
        learning_rate=0.2,
        optim="sgd",
        lr_scheduler_type="constant",
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=sampling["max_new_tokens"],
        top_k=0,
        beta=0.1,
    ),
    train_dataset=prompt_stream,
    processing_class=tokenizer,
)
trainer.remove_callback(PrinterCallback)
trainer.train()

trl_after = collect(make_policy(trl_model.eval()), held_out_prompts, answers=16)
trl_share_after = liked_share(trl_after)
print(
    f"on held-out prompts the judge likes {share_before:.0%}, then {trl_share_after:.0%}"
)

# %%
# Two libraries, one reward model, and by the same judge both policies improved.
#
# Conclusion
# ----------
#
# What the page set out to do, in the numbers of this run:

print(f"answers with identical tokens:       {sum(matching)} of {len(matching)}")
print(
    f"reward model, held-out accuracy:     {accuracy_before:.2f} -> {accuracy_after:.2f}"
)
print(f"policy liked, with GRPOLoss:         {share_before:.0%} -> {share_after:.0%}")
print(f"policy liked, with GRPOTrainer:      {share_before:.0%} -> {trl_share_after:.0%}")
workspace.cleanup()

# %%
# From this toy to your models:
#
# .. list-table::
#     :header-rows: 1
#
#     * - What changes
#       - What stays
#     * - ``checkpoint`` and ``reward_checkpoint`` name real models
#       - ``from_pretrained`` and everything below it
#     * - A person or a stronger model takes the judge's place
#       - Pairs as message lists, prompt included, and prompts held out
#     * - The tokenizer: a pad token of its own, and a template with
#         ``{% generation %}`` and nothing after an answer's end
#       - ``survives`` of 3.2, which tells you whether it is so
#     * - ``use_cpu``, ``bf16`` and ``activation_checkpointing`` go; AdamW and a small
#         learning rate come in for SGD
#       - Buffers, streams, ``map`` at the border, ``score``, the loop
#
# **Limits.** The policy speaks in templates and the judge knows one rule, so accuracies
# near 1 say that the plumbing is right, not that reward models are easy. The
# conversations have one turn.
#
# **Next.** Put your own judge into 4.2, or lengthen the loop of 4.6 by a step that
# makes new pairs from the improved policy and trains the reward model again.
