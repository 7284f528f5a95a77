"""Installation of spectral_fairseq; tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(
    r'__version__ = "([^"]+)"', (HERE / "spectral_fairseq" / "__init__.py").read_text("utf-8")
).group(1)

# What a user may ask for beside the torch library and a bare `analyze`; errors name these extras.
EXTRAS = {
    # The newest fairseq on the index imports on Python <= 3.10 only; ve-fairseq is upstream's last
    # commit with a fix of the two files that stop it there. It has no build for Python 3.13. Both
    # fill the same folder, so that neither may be required where somebody has another fairseq.
    "fairseq": [
        'fairseq==0.12.2; python_version < "3.11"',
        've-fairseq==0.12.3; python_version >= "3.11"',
        "sacrebleu>=2.0",
        "scipy",
    ],
    "plots": ["jinja2", "matplotlib"],
    "models": ["safetensors", "sentencepiece"],
    "training": ["accelerate", "lightning", "safetensors", "transformers"],
    "export": ["ctranslate2", "sacremoses", "safetensors", "transformers"],
    "predictions": ["sacrebleu>=2.0"],
    "text": ["sentencepiece", "subword-nmt"],
}
# Everything but fairseq, which is never put beside one that is there.
ALL = sorted({one for name, extra in EXTRAS.items() if name != "fairseq" for one in extra})

setup(
    name="spectral-fairseq",
    version=VERSION,
    description="Word-vector tables and output layers of language and translation models: "
    "measure, train, repair",
    author="The spectral_fairseq authors",
    maintainer="The spectral_fairseq authors",
    keywords="embeddings, representation degeneration, softmax, transformers, fairseq, "
    "language modeling, machine translation",
    long_description=(HERE / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    packages=find_packages(include=["spectral_fairseq", "spectral_fairseq.*"]),
    package_data={"spectral_fairseq": ["py.typed", "analysis/*.jinja2"]},
    python_requires=">=3.9",
    # What a bare `analyze` and `spectral_fairseq.training` import.
    install_requires=["torch>=1.12", "numpy", "tabulate>=0.9", "tqdm"],
    extras_require={
        **EXTRAS,
        "all": [*ALL, "pandas"],
        "examples": ["sentencepiece", "matplotlib", "filelock"],
        "test": [
            *("jinja2", "sacrebleu>=2.0", "scipy"),
            *("pytest", "pytest-xdist", "filelock"),
            *("sentencepiece", "matplotlib", "ctranslate2", "build", "sacremoses"),
            *("pandas", "safetensors", "transformers", "ipykernel", "nbclient"),
            *(f"{name}; python_version >= '3.11'" for name in ("accelerate", "lightning")),
        ],
        "lint": ["ruff", "mypy"],
        "docs": ["matplotlib", "mkdocs-material", "mkdocstrings[python]"],
    },
    entry_points={"console_scripts": ["spectral-fairseq=spectral_fairseq.commands.main:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.9",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
