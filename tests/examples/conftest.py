import shutil

import pytest


@pytest.fixture(scope="session")
def tiny_dialogue_data(tiny_translation_data, tmp_path_factory):
    """The binarised data of ``tiny_translation_data``, with the sides named as in a dialogue."""
    folder = tmp_path_factory.mktemp("dialogue")
    for path in tiny_translation_data.glob("*.*"):
        name = path.name.replace("de-en", "context-response")
        name = name.replace(".de", ".context").replace(".en", ".response")
        shutil.copy(path, folder / name)
    return folder


@pytest.fixture(scope="session")
def tiny_multi30k_data(tiny_translation_data, tmp_path_factory):
    """The same data, with the names of Multi30k's three test sets for its test split."""
    folder = tmp_path_factory.mktemp("multi30k")
    for path in tiny_translation_data.glob("*.*"):
        shutil.copy(path, folder / path.name)
    for name in ("test.2016", "test.2017", "test.coco"):  # text
        for language in ("de", "en"):
            shutil.copy(folder / f"test.{language}", folder / f"{name}.{language}")
    for path in sorted(folder.glob("test.de-en.*")):  # binary
        for name in ("test1", "test2"):
            shutil.copy(path, folder / path.name.replace("test", name, 1))
    return folder
