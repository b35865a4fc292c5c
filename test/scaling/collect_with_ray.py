"""Collect rollouts in a Ray worker, into a buffer in another, and train on them with TRL.

Usage: python collect_with_ray.py CHECKPOINT FOLDER
"""

import json
import sys
from pathlib import Path

import ray
from datasets import Dataset
from tensordict import set_list_to_stack
from torch.utils.data import DataLoader
from torchrl.collectors.llm import RayLLMCollector
from torchrl.data import LazyStackStorage, RayReplayBuffer
from torchrl.envs import InitTracker, StepCounter
from torchrl.envs.llm import DatasetChatEnv
from torchrl.modules.llm import TorchRLBufferDataset, TransformersWrapper
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

checkpoint, folder = sys.argv[1:]
PROMPTS = [{"query": "Where is the museum?"}, {"query": "Where is the station?"}]


def make_env():
    env = DatasetChatEnv.from_dataloader(
        DataLoader(PROMPTS),
        repeats=4,
        batch_size=(8,),
        tokenizer=AutoTokenizer.from_pretrained(checkpoint),
        system_prompt="You show visitors the way.",
    )
    return env.append_transform(StepCounter(max_steps=1)).append_transform(InitTracker())


def make_policy():
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return TransformersWrapper(
        AutoModelForCausalLM.from_pretrained(checkpoint).eval(),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        pad_output=True,
        generate_kwargs={
            "do_sample": True,
            "top_k": len(tokenizer),
            "max_new_tokens": 20,
        },
    )


ray.init(num_cpus=2, include_dashboard=False)
# [ray]
buffer = RayReplayBuffer(
    storage=lambda: LazyStackStorage(100), batch_size=16, remote_config={"num_cpus": 1}
)
collector = RayLLMCollector(
    make_env,
    policy_factory=make_policy,
    dialog_turns_per_batch=8,
    total_dialog_turns=16,
    replay_buffer=buffer.client(),  # the buffer itself cannot be sent to the collector
    remote_config={"num_cpus": 1, "num_gpus": 0},
)
while len(buffer) < 16:
    collector.next()

with set_list_to_stack(True):
    conversations = [
        [{"role": turn.role, "content": turn.content} for turn in history.unbind(0)]
        for history in buffer.sample()["history", "full"].unbind(0)
    ]
rows = [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in conversations]
# [end]

trainer = SFTTrainer(
    model=checkpoint,
    args=SFTConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        max_steps=2,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=AutoTokenizer.from_pretrained(checkpoint),
)
trainer.train()
refusal = ""
try:
    TorchRLBufferDataset(buffer, batch_size=4).as_hf_dataset()
except AttributeError as error:
    refusal = str(error)
collector.shutdown()
ray.shutdown()
result = {"refusal": refusal, "rows": rows, "steps": trainer.state.global_step}
Path(folder, "ray.json").write_text(json.dumps(result))
