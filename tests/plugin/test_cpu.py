"""``--float32-products``, chosen around every command, and ``--fast-dropout``, of other masks."""

import copy
import ctypes
import inspect
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.modules import FairseqDropout
from fairseq.optim.adam import Adam
from torch.optim.adamw import adamw

from spectral_fairseq.checkpoints.reading import load_checkpoint
from spectral_fairseq.functional.cpu_attention import has_flash_kernel
from spectral_fairseq.functional.float32_products import CHOICES, Products, choose_products
from spectral_fairseq.functional.processor import processor
from spectral_fairseq.options import FLOAT32_PRODUCTS
from spectral_fairseq.plugin import cpu
from spectral_fairseq.plugin.cpu import CHOICE, ChosenProducts
from tests.plugin.conftest import build_criterion, build_model, make_sample
from tests.plugin.test_command_line import SHARED, USER_DIR, generate
from tests.plugin.trainers import build_trainer

FAST = ("--float32-products", "fast")
SAYS = "float32 products are computed"
CFG = SimpleNamespace(common=SimpleNamespace(cpu=True))


@pytest.fixture(autouse=True)
def as_found(products_as_torch_comes):
    yield
    CHOICE.end()


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


def test_two_commands_in_one_process_do_not_disturb_each_other(monkeypatch):
    monkeypatch.setattr(cpu, "choose_products", lambda asked: Products(asked == "fast", asked))
    seen, kept = [], []
    flash = getattr(torch.backends.cuda, "flash_sdp_enabled", lambda: None)  # torch 2.0

    def main(cfg):
        seen.append((CHOICE.products, flash()))

    cfg = SimpleNamespace(
        common=SimpleNamespace(cpu=True, tpu=False),
        distributed_training=SimpleNamespace(
            distributed_init_method=None, distributed_world_size=1, pipeline_model_parallel=False,
            distributed_port=-1,
        ),
    )  # fmt: skip
    monkeypatch.setattr(distributed_utils, "infer_init_method", lambda _: None)
    monkeypatch.setattr(cpu, "keep_freed_memory", lambda: kept.append(True))
    CHOICE.asked = "fast"
    for _ in range(2):
        distributed_utils.call_main(cfg, main)
    assert [products.fast for products, _ in seen] == [True, False] and len(kept) == 2
    if has_flash_kernel():
        assert [enabled for _, enabled in seen] == [False, True]
    assert CHOICE.products is None and flash() is not False


@pytest.mark.parametrize("saved, fast", [
    ({"fast": True, "processor": processor().name}, True),
    ({"fast": True, "processor": "another"}, False),
    (None, False),
])  # fmt: skip
def test_only_the_same_kind_of_processor_takes_the_choice_of_a_checkpoint(task, saved, fast):
    CHOICE.apply(Products(False, "at first"), CFG.common)
    listener = ChosenProducts(SimpleNamespace(cfg=CFG))
    listener.load(saved)
    assert listener.save() == {"fast": fast, "processor": processor().name}


def test_a_training_that_no_command_chose_for_keeps_freed_memory_too(monkeypatch):
    """``fairseq-hydra-train`` loads the plugin too late for the choice of a command."""
    kept = []
    monkeypatch.setattr(cpu, "keep_freed_memory", lambda: kept.append(True))
    ChosenProducts(SimpleNamespace(cfg=CFG)).begin_training()
    assert kept


@pytest.mark.parametrize("flags, slow", [(("avx2",), True), (("avx512_bf16",), False)])
def test_bfloat16_without_products_of_its_own_gets_a_warning(monkeypatch, caplog, flags, slow):
    found = processor()._replace(flags=frozenset(flags))
    monkeypatch.setattr(cpu, "processor", lambda: found)
    CHOICE.apply(Products(False, "at first"), CFG.common)
    common = SimpleNamespace(cpu=True, bf16=True)
    ChosenProducts(SimpleNamespace(cfg=SimpleNamespace(common=common))).begin_training()
    assert ("multiplies bfloat16 numbers" in caplog.text) is slow
    caplog.clear()
    for path, warned in (("model.pt", slow), (None, False)):  # an evaluation; a training is later
        cfg = SimpleNamespace(common=common, common_eval=SimpleNamespace(path=path))
        cpu._choosing(lambda cfg: None)(cfg)
        assert ("multiplies bfloat16 numbers" in caplog.text) is warned
        caplog.clear()


COUNT_FAULTS = """
import resource
import torch
from spectral_fairseq.plugin.cpu import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
first, again = faults(), min(faults() for _ in range(5))
kept = keep_freed_memory()
# Something small may come to lie in the first place that is kept.
print(first, again, int(kept), min(faults() for _ in range(5)))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
@pytest.mark.parametrize("set_by_user", [None, *cpu.ALLOCATOR_VARIABLES])
def test_freed_memory_is_kept_unless_a_variable_says_otherwise(set_by_user):
    """64 MiB of zeros need new pages each time, and once where they are kept."""
    environment = {k: v for k, v in os.environ.items() if k not in cpu.ALLOCATOR_VARIABLES}
    if set_by_user:
        value = "glibc.malloc.tcache_count=7" if set_by_user == "GLIBC_TUNABLES" else "1000000"
        environment[set_by_user] = value
    argv = [sys.executable, "-c", COUNT_FAULTS]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    first, again, kept, later = map(int, done.stdout.split())
    assert kept == (set_by_user is None)
    pages = first / 2  # larger pages of the system need fewer faults
    assert again > pages and (later < pages) == kept


HUGE_PAGES = """
import resource, sys
from pathlib import Path
import torch
from spectral_fairseq.plugin import cpu
folder, limit = Path(sys.argv[1]), int(sys.argv[2])
for name, path in (("_HUGE_PAGES", "enabled"), ("_OVERCOMMIT", "overcommit")):
    if (folder / path).exists():
        setattr(cpu, name, folder / path)
if limit:
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
def kib(field):
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))
use_huge_pages, advised = cpu.use_huge_pages, []
cpu.use_huge_pages = lambda block: advised.append(use_huge_pages(block))
used = kib("Rss")
assert cpu.keep_freed_memory()
reserved, before = kib("Rss") - used, kib("AnonHugePages")
values = [torch.arange(2**22) for _ in range(4)]
print(advised[0] // 2**20, reserved // 2**10, (kib("AnonHugePages") - before) // 2**10)
"""


def huge_pages_of(folder, limit=0):
    """MiB of addresses that were asked for, of memory for them, and of 128 in huge pages."""
    environment = {k: v for k, v in os.environ.items() if k not in cpu.ALLOCATOR_VARIABLES}
    argv = [sys.executable, "-c", HUGE_PAGES, str(folder), str(limit)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    return tuple(map(int, done.stdout.split()))


@pytest.mark.skipif(not cpu._HUGE_PAGES.exists(), reason="needs Linux with huge pages")
@pytest.mark.parametrize("files, limit, asked", [
    ({"enabled": "always [madvise] never", "overcommit": "0"}, 0, True),
    ({"enabled": "[always] madvise never", "overcommit": "0"}, 0, False),
    ({"enabled": "always madvise [never]", "overcommit": "0"}, 0, False),
    ({"enabled": "always [madvise] never", "overcommit": "2"}, 0, False),
    ({"enabled": "always [madvise] never", "overcommit": "0"}, 2**36, False),
])  # fmt: skip
def test_addresses_are_taken_where_they_cost_nothing(files, limit, asked, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    addresses, memory, _ = huge_pages_of(tmp_path, limit)
    assert (addresses > 1000) if asked else (addresses == 0)
    assert memory < 16


def gives_huge_pages():
    return cpu._HUGE_PAGES.exists() and "[madvise]" in cpu._HUGE_PAGES.read_text()


@pytest.mark.skipif(not gives_huge_pages(), reason="needs Linux with huge pages for those who ask")
def test_tensors_lie_in_huge_pages(tmp_path):
    addresses, _, mib = huge_pages_of(tmp_path)
    assert addresses > 1000 and mib >= 64  # 128, less where memory is in pieces


def test_a_system_without_limits_loads_the_plugin():
    """Windows has no module ``resource``."""
    loads = "import sys; sys.modules['resource'] = None; import spectral_fairseq.plugin.cpu"
    subprocess.run([sys.executable, "-c", loads], capture_output=True, check=True)


SEVERAL_COMMANDS = """
import torch
from pathlib import Path
from spectral_fairseq.plugin import cpu
def mib():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Rss:")) // 1024
cpu.KEPT_BYTES = cpu._OLDER_LIMIT  # of which the heap has most blocks
cpu.keep_freed_memory()
values, grown = [], []
for _ in range(4):
    values.append(torch.ones(3 * 2**20))
    before = mib()
    cpu.keep_freed_memory()
    grown.append(mib() - before)
print(max(grown))
"""


@pytest.mark.slow
@pytest.mark.skipif(not gives_huge_pages(), reason="needs Linux with huge pages for those who ask")
def test_further_commands_of_a_process_take_no_more_memory():
    environment = {k: v for k, v in os.environ.items() if k not in cpu.ALLOCATOR_VARIABLES}
    argv = [sys.executable, "-c", SEVERAL_COMMANDS]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 32


# Adam in one pass


def bare_step(optimizer):
    """The step of fairseq's Adam as it comes."""
    inspect.unwrap(type(optimizer).step)(optimizer)


def adams(dtype, **options):
    """Two of fairseq's Adam for equal parameters, of which the second has float64."""
    torch.manual_seed(3)
    parameters = [torch.randn(size, dtype=dtype) for size in ((7, 5), (3,), (65, 33))]
    wide = [parameter.double().clone() for parameter in parameters]
    return Adam(parameters, **options), Adam(wide, **options)


def gradients_for(*optimizers, left_out=()):
    of = [optimizer.param_groups[0]["params"] for optimizer in optimizers]
    for index, alike in enumerate(zip(*of)):
        gradient = torch.randn_like(alike[0]) * 10.0**-index
        for parameter in alike:
            parameter.grad = None if index in left_out else gradient.to(parameter.dtype)


OPTIONS = {"lr": 0.01, "betas": (0.9, 0.98), "eps": 1e-4}


@pytest.mark.skipif(not cpu._has_fused_adam(), reason="needs torch 2.4")
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_adam_in_one_pass_steps_as_fairseq_does(dtype, bound, decay, monkeypatch):
    fused = []

    def counted(parameters, *args, **options):
        fused.append(len(parameters))
        adamw(parameters, *args, **options)

    monkeypatch.setattr(cpu, "adamw", counted)
    ours, naive = adams(dtype, weight_decay=decay, **OPTIONS)
    for update in range(12):
        gradients_for(ours, naive, left_out=[1] if update < 4 else [])
        ours.step()
        bare_step(naive)
    assert fused == [2] * 4 + [2, 1] * 8
    for mine, theirs in zip(ours.param_groups[0]["params"], naive.param_groups[0]["params"]):
        assert torch.allclose(mine.double(), theirs, rtol=bound, atol=bound)
        state, expected = ours.state[mine], naive.state[theirs]
        assert state.keys() == expected.keys() and state["step"] == expected["step"]
        for name in ("exp_avg", "exp_avg_sq"):
            error = (state[name].double() - expected[name]).abs().max()
            assert error <= bound * expected[name].abs().max()


def test_a_step_goes_on_from_what_plain_fairseq_saved_and_the_reverse():
    ours, naive = adams(torch.float64, **OPTIONS)
    for _ in range(2):
        for _update in range(3):
            gradients_for(ours, naive)
            ours.step()
            bare_step(naive)
        states = [copy.deepcopy(optimizer.state_dict()) for optimizer in (ours, naive)]
        naive.load_state_dict(states[0])
        ours.load_state_dict(states[1])
    for mine, theirs in zip(ours.param_groups[0]["params"], naive.param_groups[0]["params"]):
        assert torch.allclose(mine, theirs, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("turned", ["parameter", "gradient", "moments"])
def test_tensors_that_lie_in_memory_otherwise_are_stepped_alike(turned):
    """torch's fused step reads the numbers in the order of the memory, and takes no error."""

    def other_way_round(tensor):
        return tensor.t().contiguous().t()

    ours, naive = adams(torch.float64, **OPTIONS)
    matrix = ours.param_groups[0]["params"][0]
    if turned == "parameter":
        ours.param_groups[0]["params"][0] = other_way_round(matrix)
    for update in range(3):
        gradients_for(ours, naive)
        matrix = ours.param_groups[0]["params"][0]
        if turned == "gradient":
            matrix.grad = other_way_round(matrix.grad)
        elif turned == "parameter":
            matrix.grad = matrix.grad.contiguous()
        elif update:
            for name in ("exp_avg", "exp_avg_sq"):
                ours.state[matrix][name] = other_way_round(ours.state[matrix][name])
        ours.step()
        bare_step(naive)
    for mine, theirs in zip(ours.param_groups[0]["params"], naive.param_groups[0]["params"]):
        assert torch.allclose(mine, theirs, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("change", ["bfloat16", "amsgrad", "betas", "closure", "torch"])
def test_what_cannot_be_fused_is_stepped_by_fairseq(change, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("was fused")

    if change == "torch":
        monkeypatch.setattr(cpu, "_has_fused_adam", lambda: False)
    cpu._has_fused_adam()  # before it cannot be tried
    monkeypatch.setattr(cpu, "adamw", refuse)
    dtype = torch.bfloat16 if change == "bfloat16" else torch.float32
    options = {**OPTIONS, "amsgrad": change == "amsgrad"}
    if change == "betas":
        options["betas"] = (0.9, 1.0)
    (ours, _), (same, _) = adams(dtype, **options), adams(dtype, **options)
    gradients_for(ours, same)
    ours.step(*([lambda: None] if change == "closure" else []))
    bare_step(same)
    for mine, theirs in zip(ours.param_groups[0]["params"], same.param_groups[0]["params"]):
        assert torch.equal(mine, theirs)


def test_the_flag_offers_what_there_is():
    assert tuple(FLOAT32_PRODUCTS.choices) == CHOICES


def test_a_trainer_without_a_command_chooses_too():
    build_trainer()
    assert CHOICE.products is not None


# Fast dropout

DROPOUT = {"name": "regularized_cross_entropy", "fast_dropout": True}


def test_the_masks_are_of_the_seed_and_differ_from_fairseqs(task):
    model, sample = build_model(task, dropout=0.4).train(), make_sample(task)
    states = model.state_dict().keys()

    def loss(criterion):
        torch.manual_seed(5)
        return criterion(model, sample)[0].item()

    plain = loss(build_criterion(task, "regularized_cross_entropy"))
    criterion = build_criterion(task, **DROPOUT)
    first = loss(criterion)
    assert first == loss(criterion) and first != plain
    assert model.state_dict().keys() == states
    assert loss_of(copy.deepcopy(model).eval(), criterion, sample) == loss_of(
        model.eval(), build_criterion(task, "regularized_cross_entropy"), sample
    )
    dropouts = [one for one in model.modules() if isinstance(one, FairseqDropout)]
    assert dropouts and {type(one).__name__ for one in dropouts} == {"FastDropout"}


def loss_of(model, criterion, sample):
    return criterion(model, sample)[0].item()


def test_a_module_that_drops_in_inference_still_does(task):
    model = build_model(task, dropout=0.4).eval()
    for module in model.modules():
        if isinstance(module, FairseqDropout):
            module.apply_during_inference = True
    criterion, sample = build_criterion(task, **DROPOUT), make_sample(task)
    assert loss_of(model, criterion, sample) != loss_of(model, criterion, sample)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_model_without_dropout_is_named(task, dropout, caplog):
    build_criterion(task, **DROPOUT).check_model(build_model(task, dropout=dropout))
    assert ("--fast-dropout has no effect" in caplog.text) == (dropout == 0)
