"""The commands of docs/scaling.rst, each run as written there."""

import json
import sys
from pathlib import Path

import pytest
from conftest import TESTS, offline_environment, run
from datasets import Dataset, load_dataset

SCALING = TESTS / "scaling"
BIN = Path(sys.executable).parent
LAUNCHERS = {
    "python": [sys.executable],
    "torchrun": [BIN / "torchrun", "--nproc-per-node", "2", "--master-port", "29555"],
    "accelerate": [BIN / "accelerate", "launch", "--cpu", "--num_processes", "2"],
}


@pytest.fixture(scope="module")
def trained_by(journey, tmp_path_factory):
    """Launch train_reward.py: a function from a launcher's name to the ranks' results."""
    results = {}

    def launch(name):
        if name not in results:
            folder = tmp_path_factory.mktemp(name)
            arguments = [journey(0) / "checkpoint", journey(0) / "names.json", folder]
            environment = offline_environment(folder / "home", OMP_NUM_THREADS="1")
            command = [*LAUNCHERS[name], SCALING / "train_reward.py", *arguments]
            run(command, folder, environment)
            ranks = sorted(folder.glob("rank*.json"))
            results[name] = [json.loads(rank.read_text()) for rank in ranks]
        return results[name]

    return launch


def test_torchrun_trains_one_model_in_two_processes(trained_by):
    first, second = trained_by("torchrun")
    assert first["processes"] == second["processes"] == 2
    assert first["weights"] == pytest.approx(second["weights"], abs=1e-6)


def test_two_processes_have_the_losses_of_one(trained_by):
    (alone,) = trained_by("python")
    parallel = trained_by("torchrun")[0]
    assert alone["processes"] == 1
    assert alone["losses"][-1] < alone["losses"][0]
    assert parallel["losses"] == pytest.approx(alone["losses"], abs=0.01)


def test_accelerate_launch_on_cpu_runs_one_process(trained_by):
    (alone,) = trained_by("accelerate")
    assert alone["processes"] == 1


def test_ray_collects_and_trl_trains(journey, tmp_path):
    script = SCALING / "collect_with_ray.py"
    environment = offline_environment(tmp_path / "home", RAY_AUTH_MODE="disabled")
    environment |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "TMPDIR": "/tmp",  # short socket paths
    }
    checkpoint = journey(0) / "checkpoint"
    run([sys.executable, script, checkpoint, tmp_path], tmp_path, environment)
    result = json.loads((tmp_path / "ray.json").read_text())
    assert result["steps"] == 2
    assert "_futures_lock" in result["refusal"]
    assert len(result["rows"]) == 16
    for row in result["rows"]:
        assert [turn["role"] for turn in row["prompt"]] == ["system", "user"]
        assert row["completion"][0]["role"] == "assistant"
    assert len({row["completion"][0]["content"] for row in result["rows"]}) > 4


@pytest.mark.parametrize("form", ["json", "parquet"])
def test_pairs_outlive_the_process(toy, tmp_path, form):
    # [files]
    path = str(tmp_path / f"pairs.{form}")
    dataset = Dataset.from_list(toy.train_pairs)
    dataset.to_json(path) if form == "json" else dataset.to_parquet(path)
    again = load_dataset(form, data_files=path, split="train", cache_dir=str(tmp_path))
    # [end]
    assert again.to_list() == toy.train_pairs
