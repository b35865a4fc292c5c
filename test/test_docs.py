"""The built site and the downloaded notebook."""

import fnmatch
import importlib
import json
import re

import matplotlib.image as mpimg
import pytest
from bs4 import BeautifulSoup
from conftest import REPOSITORY, ROOT

INVENTORIES = sorted((ROOT / "docs" / "_inventories").glob("*.txt"))


@pytest.fixture(scope="module")
def page(site):
    return BeautifulSoup((site / "tutorials/trl_interop.html").read_text(), "html.parser")


@pytest.mark.parametrize("inventory", INVENTORIES, ids=lambda path: path.stem)
def test_inventory_names_import(inventory):
    rows = [line.split() for line in inventory.read_text().splitlines()[3:]]
    assert rows == sorted(rows)
    for name, kind, _ in rows:
        module, *attributes = name.split(".")
        value = importlib.import_module(module)
        for attribute in attributes:
            if not hasattr(value, attribute):
                importlib.import_module(f"{value.__name__}.{attribute}")
            value = getattr(value, attribute)
        assert isinstance(value, type) or kind != "class", name


def test_tests_that_the_pages_name_exist():
    sources = [path.read_text() for path in (ROOT / "docs").glob("*.rst")]
    named = set(re.findall(r"\btest_\w+\b(?!\.py)\*?", "\n".join(sources)))
    code = "\n".join(path.read_text() for path in (ROOT / "test").glob("test_*.py"))
    defined = re.findall(r"(?m)^def (test_\w+)", code)
    assert len(named) > 30
    assert not {pattern for pattern in named if not fnmatch.filter(defined, pattern)}


def test_headings(page):
    assert len(page.find_all("h1")) == 1
    parts = [heading.text.rstrip("#") for heading in page.find_all("h2")]
    assert [part.split(":")[0] for part in parts] == [
        *(f"Part {number}" for number in (1, 2, 3, 4)),
        "Conclusion",
    ]
    steps = [heading.text.split()[0] for heading in page.find_all("h3")]
    wanted = {"1": 6, "2": 5, "3": 2, "4": 7}
    assert steps == [
        f"{part}.{n + 1}" for part, count in wanted.items() for n in range(count)
    ]
    anchors = [section["id"] for section in page.find_all("section")]
    assert len(anchors) == len(set(anchors))


def test_page_prints_what_the_script_prints(page, outcomes):
    """Two runs in different processes, one of them by sphinx-gallery, print the same."""
    printed = [block.text for block in page.select(".sphx-glr-script-out pre")]
    lines = [line for text in printed for line in text.splitlines() if line.strip()]
    expected = [line for line in outcomes(0)["printed"].splitlines() if line.strip()]
    # sphinx-gallery takes away the indentation that all lines of an output share
    assert [line.strip() for line in lines] == [line.strip() for line in expected]


def test_no_noise_in_the_outputs(page):
    text = "\n".join(block.text for block in page.select(".sphx-glr-script-out"))
    for noise in ("Warning", "/tmp", "site-packages", "it/s", "{'loss'", "TrainOutput"):
        assert noise not in text


def test_figures_have_alternative_text(page):
    article = page.find("article")
    images = article.find_all("img")
    assert len(images) == 4
    assert all(len(image["alt"]) > 30 for image in images)


def test_readme_shows_the_figure_of_the_build(site):
    built, kept = (
        mpimg.imread(path)
        for path in (
            site / "_images" / "sphx_glr_trl_interop_003.png",
            ROOT / "docs" / "_static" / "policy.png",
        )
    )
    assert built.shape == kept.shape
    assert abs(built - kept).mean() < 0.02, f"copy it from {site}"


def test_names_link_to_their_documentation(page):
    in_code = {link["href"] for link in page.select("a[class*=sphx-glr-backref-module]")}
    in_prose = {link["href"] for link in page.select("a.reference.external")}
    for name, links in (
        ("torchrl.collectors.llm.LLMCollector", in_code),
        ("torchrl.modules.llm.HFRewardModelWrapper", in_code),
        ("torchrl.modules.llm.TorchRLBufferDataset", in_prose),
        ("tensordict.set_list_to_stack", in_code),
        ("transformers.AutoTokenizer.from_pretrained", in_code),
        ("torchrl.envs.llm.DatasetChatEnv.from_dataloader", in_code),
        ("trl.RewardTrainer", in_code),
        ("trl.RewardTrainer", in_prose),
        ("datasets.IterableDataset", in_prose),
        ("torch.optim.SGD", in_code),
    ):
        assert any(link.endswith(f"#{name}") for link in links), name


def test_page_features(page, site):
    links = {link.get("href", "") for link in page.find_all("a")}
    assert any(link.endswith("trl_interop.py") for link in links)
    assert any(link.endswith("trl_interop.ipynb") for link in links)
    assert f"https://github.com/{REPOSITORY}/edit/main/tutorials/trl_interop.py" in links
    notebook = f"github/{REPOSITORY}/blob/gh-pages/trl_interop.ipynb"
    assert f"https://colab.research.google.com/{notebook}" in links
    assert (site / "trl_interop.ipynb").exists()
    assert page.select("button.theme-switch-button")
    assert "Total running time" in page.text
    assert re.search(r"torchrl +0\.14", page.text)
    card = page.find("meta", property="og:image")["content"]
    assert (site / card.split("/", 4)[-1]).exists()
    assert len(page.find("meta", attrs={"name": "description"})["content"]) > 60
    assert "404.html" in {path.name for path in site.iterdir()}
    assert '"rewardtrain"' in (site / "searchindex.js").read_text() or (
        "rewardtrain:" in (site / "searchindex.js").read_text()
    )


def test_pages_load_nothing_from_outside(site):
    for path in site.rglob("*.html"):
        soup = BeautifulSoup(path.read_text(), "html.parser")
        loaded = [
            tag.get("src") or "" for tag in soup.find_all(["script", "img", "iframe"])
        ]
        loaded += [tag["href"] for tag in soup.find_all("link", rel="stylesheet")]
        assert not [url for url in loaded if url.startswith(("http", "//"))], path


def test_notebook_reads_well(site):
    notebook = json.loads((site / "trl_interop.ipynb").read_text())
    code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    prose = "\n".join(
        "".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "markdown"
    )
    assert "".join(code[0]["source"]).startswith("%pip install")
    for markup in (":class:", ".. ", "::\n", ":alt:", "{.interpreted-text"):
        assert markup not in prose, markup
    assert "data:image/svg+xml" in prose
    assert "| Trainer" in prose
