"""Train a reward model on pairs in a TorchRL buffer, in one process or in several.

Usage: torchrun --nproc-per-node 2 train_reward.py CHECKPOINT PAIRS.json FOLDER
"""

import json
import os
import sys
from pathlib import Path

import torch
from tensordict import TensorDict, lazy_stack, set_list_to_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.modules.llm import TorchRLBufferDataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed
from trl import RewardConfig, RewardTrainer

checkpoint, pairs, folder = sys.argv[1:]

# [data] every rank holds the same buffer and draws the same rows; TRL keeps its slice
set_seed(0)
buffer = ReplayBuffer(storage=LazyStackStorage(1000))
stream = TorchRLBufferDataset(buffer, batch_size=16, num_batches=None).as_hf_dataset()
with set_list_to_stack(True):
    rows = json.loads(Path(pairs).read_text())["train_pairs"]
    buffer.extend(lazy_stack([TensorDict(row) for row in rows]))

trainer = RewardTrainer(
    model=AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=1),
    args=RewardConfig(
        output_dir=folder,
        use_cpu=True,  # without it the ranks train alone, and nothing says so
        bf16=False,
        accelerator_config={"split_batches": True},  # 16 rows in all, not for each rank
        max_steps=20,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        logging_steps=5,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    ),
    train_dataset=stream.map(lambda row: {k: v.tolist() for k, v in row.items()}),
    processing_class=AutoTokenizer.from_pretrained(checkpoint),
)
trainer.train()
# [end]

rank = os.environ.get("RANK", "0")
result = {
    "processes": trainer.accelerator.num_processes,
    "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
    "weights": sum(p.double().sum().item() for p in trainer.model.parameters()),
}
Path(folder, f"rank{rank}.json").write_text(json.dumps(result))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
