"""``--float32-products``, chosen around every command."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from fairseq import options
from fairseq.distributed import utils as distributed_utils

from spectral_fairseq.checkpoints.reading import load_checkpoint
from spectral_fairseq.functional.cpu_attention import has_flash_kernel
from spectral_fairseq.functional.float32_products import CHOICES, Products, choose_products
from spectral_fairseq.functional.processor import processor
from spectral_fairseq.options import FLOAT32_PRODUCTS
from spectral_fairseq.plugin import products
from spectral_fairseq.plugin.products import ChosenProducts, running
from tests.plugin.test_command_line import SHARED, USER_DIR, generate
from tests.plugin.trainers import build_trainer

FAST = ("--float32-products", "fast")
SAYS = "float32 products are computed"
CFG = SimpleNamespace(common=SimpleNamespace(cpu=True))


@pytest.fixture(autouse=True)
def as_found(products_as_torch_comes, monkeypatch):
    monkeypatch.setenv(products._VARIABLE, FLOAT32_PRODUCTS.default)  # a command may set it
    yield
    running().end()


def test_a_training_says_what_it_does_and_a_resumed_one_goes_on_with_it(train):
    run = ("transformer", "regularized_cross_entropy", SHARED)
    ways = ["fast", "torch"]  # the one that `auto` does not take on this processor, and the other
    wording = {"fast": "oneDNN", "torch": "as torch comes"}
    other, same = reversed(ways) if choose_products().fast else ways
    first = train(*run, "--float32-products", other)
    said = f"{SAYS} {wording[other]}: --float32-products {other}"
    assert said in (first / "log.txt").read_text()
    last = first / "checkpoint_last.pt"
    kept = load_checkpoint(last)["extra_state"]["float32_products"]
    assert kept == {"fast": other == "fast", "processor": processor().name}
    more = ("--max-epoch", "2", "--max-update", "6", "--restore-file", last)
    resumed = (train(*run, *more) / "log.txt").read_text()
    assert f"{SAYS} {wording[other]}: as in the checkpoint" in resumed
    told = (train(*run, *more, "--float32-products", same) / "log.txt").read_text()
    assert "as in the checkpoint" not in told and f"{SAYS} {wording[same]}" in told


def test_translation_takes_the_flag(train, run_cli, tiny_translation_data):
    path = train("transformer", "regularized_cross_entropy", SHARED) / "checkpoint_last.pt"
    plain, fast = (
        generate(run_cli, tiny_translation_data, path, *USER_DIR, *more) for more in ((), FAST)
    )
    assert {key: text for key, (_, text) in plain.items()} == {
        key: text for key, (_, text) in fast.items()
    }


@pytest.mark.parametrize("flag, fast", [("fast", True), ("torch", False)])
def test_the_command_that_calls_its_main_itself_multiplies_as_it_is_told(monkeypatch, flag, fast):
    seen, kept = [], []
    generate = importlib.import_module("fairseq_cli.generate")
    monkeypatch.setattr(products, "keep_freed_memory", lambda: kept.append(True))
    parser = options.get_generation_parser()
    arguments = ["data", "--task", "translation", "--path", "a.pt", "--cpu"]
    args = options.parse_args_and_arch(parser, [*arguments, FLOAT32_PRODUCTS.flag, flag])
    monkeypatch.setattr(generate, "_main", lambda cfg, _: seen.append(running().products.fast))
    before = running().products
    generate.main(args)
    assert seen == [fast] and kept == [True] and running().products is before


def test_two_commands_in_one_process_do_not_disturb_each_other(monkeypatch):
    monkeypatch.setattr(products, "choose_products", lambda asked: Products(asked == "fast", asked))
    seen, kept = [], []
    flash = getattr(torch.backends.cuda, "flash_sdp_enabled", lambda: None)  # torch 2.0
    before = running().products, flash()

    def main(cfg):
        seen.append((running().products, flash()))

    cfg = SimpleNamespace(
        common=SimpleNamespace(cpu=True, tpu=False),
        distributed_training=SimpleNamespace(
            distributed_init_method=None, distributed_world_size=1, pipeline_model_parallel=False,
            distributed_port=-1,
        ),
    )  # fmt: skip
    monkeypatch.setattr(distributed_utils, "infer_init_method", lambda _: None)
    monkeypatch.setattr(products, "keep_freed_memory", lambda: kept.append(True))
    for choice in ("fast", "auto"):
        monkeypatch.setenv(products._VARIABLE, choice)
        distributed_utils.call_main(cfg, main)
    assert [chosen.fast for chosen, _ in seen] == [True, False] and len(kept) == 2
    if has_flash_kernel():
        assert [enabled for _, enabled in seen] == [False, True]
    assert (running().products, flash()) == before


@pytest.mark.parametrize("saved, fast", [
    ({"fast": True, "processor": processor().name}, True),
    ({"fast": True, "processor": "another"}, False),
    (None, False),
])  # fmt: skip
def test_only_the_same_kind_of_processor_takes_the_choice_of_a_checkpoint(task, saved, fast):
    running().multiply(Products(False, "at first"), CFG.common)
    listener = ChosenProducts(SimpleNamespace(cfg=CFG))
    listener.restore(saved)
    assert listener.save() == {"fast": fast, "processor": processor().name}


def test_a_training_that_no_command_chose_for_keeps_freed_memory_too(monkeypatch):
    """``fairseq-hydra-train`` loads the plugin too late for the choice of a command."""
    kept = []
    monkeypatch.setattr(products, "keep_freed_memory", lambda: kept.append(True))
    ChosenProducts(SimpleNamespace(cfg=CFG)).begin_training()
    assert kept


@pytest.mark.parametrize("flags, slow", [(("avx2",), True), (("avx512_bf16",), False)])
def test_bfloat16_without_products_of_its_own_gets_a_warning(monkeypatch, caplog, flags, slow):
    found = processor()._replace(flags=frozenset(flags))
    monkeypatch.setattr(products, "processor", lambda: found)
    running().multiply(Products(False, "at first"), CFG.common)
    common = SimpleNamespace(cpu=True, bf16=True)
    ChosenProducts(SimpleNamespace(cfg=SimpleNamespace(common=common))).begin_training()
    assert ("multiplies bfloat16 numbers" in caplog.text) is slow
    caplog.clear()
    for path, warned in (("model.pt", slow), (None, False)):  # an evaluation; a training is later
        cfg = SimpleNamespace(common=common, common_eval=SimpleNamespace(path=path))
        with products.multiplying(cfg):
            pass
        assert ("multiplies bfloat16 numbers" in caplog.text) is warned
        caplog.clear()


def test_the_flag_offers_what_there_is():
    assert tuple(FLOAT32_PRODUCTS.choices) == CHOICES


def test_a_trainer_without_a_command_chooses_too():
    build_trainer()
    assert running().products is not None
