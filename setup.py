"""Installation of spectral_fairseq; tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(
    r'__version__ = "([^"]+)"', (HERE / "spectral_fairseq" / "__init__.py").read_text("utf-8")
).group(1)

setup(
    name="spectral-fairseq",
    version=VERSION,
    description="Spectrum control, embedding regularisation and softmax mixtures for fairseq",
    author="The spectral_fairseq authors",
    maintainer="The spectral_fairseq authors",
    keywords="fairseq, embeddings, representation degeneration, mixture of softmaxes, "
    "language modeling, machine translation",
    long_description=(HERE / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    packages=find_packages(include=["spectral_fairseq", "spectral_fairseq.*"]),
    package_data={"spectral_fairseq": ["py.typed", "analysis/*.jinja2"]},
    python_requires=">=3.9",
    install_requires=[
        "torch>=1.12",
        # The newest fairseq on the index imports on Python <= 3.10 only; ve-fairseq is upstream's
        # last commit with a fix of the two files that stop it there.
        'fairseq==0.12.2; python_version < "3.11"',
        've-fairseq==0.12.3; python_version >= "3.11"',
        "jinja2",
        "sacrebleu>=2.0",
        "scipy",
        "tabulate>=0.9",
        "tqdm",
    ],
    extras_require={
        "text": ["sentencepiece", "subword-nmt"],
        "plots": ["matplotlib"],
        "models": ["safetensors", "sentencepiece"],
        "export": ["ctranslate2", "sacremoses", "safetensors", "transformers"],
        "training": ["accelerate", "lightning", "safetensors", "transformers"],
        "examples": ["sentencepiece", "matplotlib", "filelock"],
        "test": [
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
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
