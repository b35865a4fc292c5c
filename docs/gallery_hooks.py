"""What sphinx-gallery calls before it runs the example."""

import warnings

# Importing these warns and changes the warning filters, so it comes before.
import torchrl.collectors.llm
import torchrl.objectives.llm  # noqa: F401
from trl import GRPOTrainer, RewardTrainer  # noqa: F401


def warnings_are_errors(gallery_conf, fname):
    """Make each warning in the example fatal, but for the listed ones."""
    warnings.resetwarnings()
    warnings.simplefilter("error")
    for message, category in (
        # torchrl 0.14, when it generates, calls cross_entropy by an old argument.
        ("size_average and reduce args will be deprecated", UserWarning),
        # trl 1.16 asks a transformers 5.24 model for a property by its old name.
        ("`is_gradient_checkpointing` is deprecated", FutureWarning),
    ):
        warnings.filterwarnings("ignore", message, category)
