"""Runs of the script and a build of the docs, each made once and shared by all tests."""

import ast
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
SCRIPT = ROOT / "tutorials" / "trl_interop.py"
REPOSITORY = "some-owner/some-repository"


def offline_environment(home, **extra):
    """An environment with an empty home, no network and nothing set for the hub."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "LIST_TO"))}
    home.mkdir(parents=True, exist_ok=True)
    return kept | {
        "HOME": str(home),
        "TMPDIR": str(home),
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "agg",
        "PYTHONPATH": str(TESTS / "offline"),
        **extra,
    }


def finished(command, cwd, environment):
    """Run a command to its end, whatever that is."""
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def run(*args):
    """Run a command to its end; a failure shows what it wrote."""
    assert_success(finished(*args))


def assert_success(result):
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]


def one_replaced(text, old, new):
    """A text with its one occurrence of a string replaced."""
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the script"
    return text.replace(old, new)


@pytest.fixture(scope="session")
def journey(tmp_path_factory):
    """A function from a seed and edits of the script to the folder of that run."""

    @cache  # failed runs too
    def finished_journey(seed, edits):
        base = tmp_path_factory.mktemp(f"seed{seed}-")
        for name in ("work", "out"):
            (base / name).mkdir()
        source = SCRIPT.read_text()
        for old, new in (("SEED = 0\n", f"SEED = {seed}\n"), *edits):
            source = one_replaced(source, old, new)
        script = base / "trl_interop.py"
        script.write_text(source)
        command = [sys.executable, TESTS / "run_cells.py", script, base / "out"]
        environment = offline_environment(base / "home", LIST_TO_STACK=str(seed % 2))
        return finished(command, base / "work", environment), base / "out"

    def journey_of(seed=0, edits=()):
        result, folder = finished_journey(seed, edits)
        assert_success(result)
        return folder

    return journey_of


@pytest.fixture(scope="session")
def outcomes(journey):
    """A function: the arguments of ``journey`` to the outcomes of that run."""
    return lambda *args, **kwargs: json.loads(
        (journey(*args, **kwargs) / "outcomes.json").read_text()
    )


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The HTML pages, built by Sphinx from a copy of the sources with warnings fatal."""
    base = tmp_path_factory.mktemp("site")
    ignored = shutil.ignore_patterns("_build", "tutorials")
    shutil.copytree(ROOT / "docs", base / "docs", ignore=ignored)
    for name in ("tutorials", "test"):
        shutil.copytree(ROOT / name, base / name)
    shutil.copy(ROOT / "pyproject.toml", base)
    command = [sys.executable, "-m", "sphinx", "-nW", "--keep-going", "-b", "html"]
    environment = offline_environment(base / "home", GITHUB_REPOSITORY=REPOSITORY)
    run([*command, "docs", "html"], base, environment)
    return base / "html"


@pytest.fixture(scope="session")
def toy(journey):
    """The script's functions, with the tokenizer, models and pairs of a finished run.

    Imports and functions are taken from the script's source, so that tests use the code
    that readers see; the journey itself is not run again.
    """
    kept = (ast.Import, ast.ImportFrom, ast.FunctionDef)
    tree = ast.parse(SCRIPT.read_text())
    tree.body = [node for node in tree.body if isinstance(node, kept)]
    names = {}
    exec(compile(tree, str(SCRIPT), "exec"), names)
    folder = journey(0)
    checkpoint = str(folder / "checkpoint")
    names |= {
        "checkpoint": checkpoint,
        "tokenizer": names["AutoTokenizer"].from_pretrained(checkpoint),
        "trained": str(folder / "trained"),
        **json.loads((folder / "names.json").read_text()),
    }
    return SimpleNamespace(**names)
