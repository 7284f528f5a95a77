"""Installation of spectral_fairseq; tool settings are in pyproject.toml."""

import os
import re
from pathlib import Path

from setuptools import Distribution, find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(
    r'__version__ = "([^"]+)"', (HERE / "spectral_fairseq" / "__init__.py").read_text("utf-8")
).group(1)
# Where the project is hosted, such as https://HOST/OWNER/NAME: the workflow that publishes says so.
# Without it the metadata name no address, and README's links stay relative.
REPOSITORY = os.environ.get("REPOSITORY", "").rstrip("/")


def project_urls():
    """The links beside the description on an index."""
    if not REPOSITORY:
        return {}
    return {
        "Homepage": REPOSITORY,
        "Source": f"{REPOSITORY}/tree/v{VERSION}",
        "Documentation": f"{REPOSITORY}/tree/v{VERSION}/docs",
        "Issues": f"{REPOSITORY}/issues",
        "Changelog": f"{REPOSITORY}/blob/v{VERSION}/CHANGELOG.md",
    }


def long_description():
    """README with links and pictures that lead to the files of this version's tag."""
    text = (HERE / "README.md").read_text("utf-8")
    if not REPOSITORY:
        return text
    at_tag = rf"{REPOSITORY}/{{}}/v{VERSION}/\1"
    relative = r"(?!https?:|mailto:|#)([^)\s\"]+)"
    text = re.sub(rf'(?<=src="){relative}', at_tag.format("raw"), text)
    return re.sub(rf"(?<=\]\(){relative}", at_tag.format("blob"), text)


class WithExpression(Distribution):
    """Give the licence as an SPDX expression, which setuptools reads from pyproject.toml only.

    The setuptools of the oldest environments cannot, and says it in words.
    """

    def __init__(self, attrs=None):
        super().__init__(attrs)
        if hasattr(self.metadata, "license_expression"):
            self.metadata.license_expression, self.metadata.license = "MIT", None


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
    long_description=long_description(),
    long_description_content_type="text/markdown",
    project_urls=project_urls(),
    license="MIT",
    license_files=["LICENSE"],
    distclass=WithExpression,
    packages=find_packages(include=["spectral_fairseq", "spectral_fairseq.*"]),
    package_data={"spectral_fairseq": ["py.typed", "analysis/*.jinja2"]},
    python_requires=">=3.9",
    # What a bare `analyze` and `spectral_fairseq.training` import.
    install_requires=["torch>=1.12", "numpy", "tabulate>=0.9", "tqdm"],
    extras_require={**EXTRAS, "all": [*ALL, "pandas"]},
    entry_points={"console_scripts": ["spectral-fairseq=spectral_fairseq.commands.main:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.9",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Text Processing :: Linguistic",
        "Typing :: Typed",
    ],
)
