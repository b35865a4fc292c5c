"""Sphinx configuration; the build executes the tutorial."""

import os
import shutil
import sys
import tomllib
from pathlib import Path

DOCS = Path(__file__).parent
PYPROJECT = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())
REQUIREMENTS = PYPROJECT["project"]["dependencies"]
sys.path.insert(0, str(DOCS))  # for gallery_hooks

# The example runs without the hub, and its page shows no progress bars.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TQDM_DISABLE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

project = "TorchRL and TRL"
author = "The tutorial's authors"
copyright = author
repository = os.environ.get(
    "GITHUB_REPOSITORY", "OWNER/REPOSITORY"
)  # set by GitHub Actions
owner, _, name = repository.partition("/")
site_url = f"https://{owner.lower()}.github.io/{name}/"

extensions = [
    "notfound.extension",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "sphinxext.opengraph",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["custom.css"]
nitpicky = True

# Kept by hand, so that a build needs no network; test/test_docs.py imports every name.
DOCS_OF = {
    "datasets": "https://huggingface.co/docs/datasets/en/",
    "tensordict": "https://docs.pytorch.org/tensordict/stable/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "torchrl": "https://docs.pytorch.org/rl/stable/",
    "transformers": "https://huggingface.co/docs/transformers/en/",
    "trl": "https://huggingface.co/docs/trl/en/",
}
intersphinx_mapping = {
    name: (url, f"_inventories/{name}.txt") for name, url in DOCS_OF.items()
}

NOTEBOOK_PANDOC = ["--to=gfm", "--wrap=none", f"--lua-filter={DOCS / 'notebook.lua'}"]
sphinx_gallery_conf = {
    "examples_dirs": "../tutorials",
    "gallery_dirs": "tutorials",
    "filename_pattern": "trl_interop",
    "abort_on_example_error": True,
    "capture_repr": ("_repr_html_",),
    "download_all_examples": False,
    "first_notebook_cell": "%pip install -q " + " ".join(f'"{r}"' for r in REQUIREMENTS),
    "image_srcset": ["2x"],
    "pypandoc": {"extra_args": NOTEBOOK_PANDOC},
    "reset_modules": ("matplotlib", "gallery_hooks.warnings_are_errors"),
    "show_signature": False,
    "write_computation_times": False,
}
html_theme = "pydata_sphinx_theme"
html_favicon = "_static/favicon.svg"
html_title = "TorchRL and TRL"
html_show_sourcelink = False
html_sidebars = {"**": []}  # few pages: the bar on top has them all
html_theme_options = {
    "github_url": f"https://github.com/{repository}",
    "use_edit_page_button": True,
    "show_toc_level": 2,
    "navbar_end": ["theme-switcher", "navbar-icon-links"],
    "secondary_sidebar_items": ["page-toc", "launch", "edit-this-page"],
    "footer_start": ["sphinx-version"],
    "footer_end": ["theme-version"],
}
html_context = {
    "default_mode": "auto",
    "edit_page_url_template": (
        "https://github.com/{{ repository }}/edit/main/"
        "{{ file_name.replace('.rst', '.py') if file_name.startswith('tutorials/')"
        " else 'docs/' + file_name }}"
    ),
    "edit_page_provider_name": "GitHub",
    "repository": repository,
}

notfound_urls_prefix = f"/{name}/"
ogp_site_url = site_url
ogp_description_length = 180
copybutton_exclude = ".linenos, .gp, .go"


def publish_notebook(app, exception):
    """Put the notebook at the root of the site, where the Colab link finds it."""
    if exception is None:
        shutil.copy(DOCS / "tutorials" / "trl_interop.ipynb", app.outdir)


def setup(app):
    app.connect("build-finished", publish_notebook)
