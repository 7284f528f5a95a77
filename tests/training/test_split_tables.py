"""Tables that are split over devices: right where a worker holds them whole, refused elsewhere."""

import functools

import pytest
import torch
from torch import nn

from spectral_fairseq.embeddings import TABLES as KINDS
from spectral_fairseq.embeddings import FactoredEmbedding
from spectral_fairseq.errors import ConfigurationError, DataError, UnsupportedError
from spectral_fairseq.methods.control import ControlRule
from spectral_fairseq.training import (
    Muon,
    SpectrumControl,
    TablePenalty,
    factor_,
    fused_loss_,
    hidden_matrices,
    mixture_,
    parameter_groups,
    plain_,
    plain_state_dict,
    repair_,
    restore_,
    weight_norm_,
)
from spectral_fairseq.training.factored_layers import whole_weight
from tests.training.models import (
    DIM,
    IDS,
    LABELS,
    TABLES,
    WORDS,
    Straight,
    build,
    outputs_of_tokens,
    same_outputs_of_tokens,
)
from tests.workers import on_two_workers

fsdp = pytest.importorskip("torch.distributed.fsdp")
FACTORED = {kind.kind: kind for kind in KINDS if issubclass(kind, FactoredEmbedding)}
PADDING = 1
COUNT = int(LABELS.ne(-100).sum())
METHODS = {
    **TABLES,
    "slowed lengths": lambda model: weight_norm_(model, gamma=0.25, tau=1).set_epoch(1),
    "mixture": lambda model: mixture_(model, 2, shift=True),
}
needs_fully_shard = pytest.mark.skipif(
    not hasattr(fsdp, "fully_shard") or not hasattr(torch.cpu.Stream, "record_event"),
    reason="this torch has no fully_shard for CPUs",
)


@pytest.mark.parametrize("split", [0, 1])
def test_tables_that_are_split_over_devices_are_refused(mesh, split):
    from torch.distributed.tensor import Shard, distribute_tensor

    model = Straight()
    whole = SpectrumControl(model, every=1)
    loss = fused_loss_(model, shift=False)
    model.lm_head.weight = nn.Parameter(
        distribute_tensor(model.lm_head.weight.detach(), mesh, [Shard(split)])
    )
    by_columns = (
        lambda: SpectrumControl(model),
        lambda: SpectrumControl(model.lm_head.weight),
        whole.step,
    )
    for attempt in (
        *(by_columns if split else ()),
        lambda: weight_norm_(model),
        lambda: factor_(model),
        lambda: fused_loss_(model, shift=False),
        lambda: loss(model(IDS), IDS),
    ):
        with pytest.raises(UnsupportedError, match="DTensor"):
            attempt()


@needs_fully_shard
def test_fully_shard_is_refused(mesh):
    model = Straight()
    fsdp.fully_shard(model, mesh=mesh)
    for attempt in (weight_norm_, factor_):
        with pytest.raises(UnsupportedError, match="DTensor"):
            attempt(model)

    class FullyShardedDataParallel(nn.Module):
        lm_head = None

    with pytest.raises(UnsupportedError, match="FullyShardedDataParallel"):
        SpectrumControl(FullyShardedDataParallel())


@pytest.mark.parametrize("table", [weight_norm_, factor_])
def test_tensor_parallelism_of_a_layer_with_a_table_is_refused(mesh, table):
    """torch's own error was of a parameter name with a dot in it."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    for tied in (False, True):
        for plan in ({"lm_head": ColwiseParallel()}, {"embed": RowwiseParallel()}):
            model = Straight(tied)
            table(model)
            if not tied and "embed" in plan:
                continue
            with pytest.raises(UnsupportedError, match="tensor parallelism splits"):
                parallelize_module(model, mesh, plan)


@needs_fully_shard
@pytest.mark.parametrize("table", TABLES)
def test_groups_of_an_optimiser_are_made_after_fully_shard(mesh, table):
    """They only ask which parameters are the table's, and were refused for one that is split."""
    model = nn.Sequential(nn.Embedding(WORDS, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, WORDS))
    model.lm_head = model[2]
    expected = [name for name, one in model.named_parameters() if one is model[1].weight]
    TABLES[table](model)
    fsdp.fully_shard(model, mesh=mesh)
    found = hidden_matrices(model)
    assert [name for name, one in model.named_parameters() if one is found[0]] == expected
    assert len(found) == 1
    groups = parameter_groups(model, lr=1.0, table_lr=0.1)
    mine = {id(one) for one in model[2].parameters() if one is not model[2].bias}
    slow = {id(one) for group in groups if group["lr"] == 0.1 for one in group["params"]}
    assert mine == slow


def test_deepspeeds_third_stage_is_refused():
    weight = Straight().lm_head.weight
    weight.ds_id = 3
    # Its second stage, which keeps a table whole, is no remedy for a control.
    with pytest.raises(UnsupportedError, match="DeepSpeed.*without SpectrumControl, DeepSpeed"):
        SpectrumControl(weight)


@pytest.mark.parametrize(
    "use", [SpectrumControl, lambda model: SpectrumControl(model.lm_head.weight), repair_, factor_]
)
def test_a_table_that_deepspeed_overwrites_is_refused(use):
    """Its first and second stage step a copy of all parameters: what was changed here was lost."""
    model = Straight()
    control = SpectrumControl(model, every=1)
    for parameter in model.parameters():
        parameter._hp_mapping = None  # of parameters that another worker steps
    for attempt in (lambda: use(model), control.step):
        with pytest.raises(UnsupportedError, match="DeepSpeed's overwrites from a copy"):
            attempt()


def trained(method, shard=None, ids=IDS, total=None):
    """Gradients of a model and its loss, the whole batch's share of them on each worker."""
    torch.manual_seed(0)
    model = Straight(tied=True)
    METHODS[method](model)
    penalty = TablePenalty(model, cosine=0.5)
    loss = fused_loss_(model, shift=True, penalty=penalty)
    if shard is not None:
        fsdp.fully_shard(model, **shard)
    loss(model(ids), ids, total).backward()
    return {name: whole(one.grad) for name, one in model.named_parameters()}


class Tied(nn.Module):
    """A table of its own, whose padding row is not zero, looked up and projected."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.table = kind.from_dense(torch.randn(WORDS, DIM), padding_idx=PADDING).eval()

    def forward(self, tokens):
        return self.table.project(self.table(tokens)).logsumexp(-1).mean()


def tied(kind, tokens, shard=False):
    model = Tied(kind)
    if shard:
        fsdp.fully_shard(model)
    model(tokens).backward()
    return {name: whole(one.grad) for name, one in model.named_parameters()}


def told(table, shard=None, **options):
    """A model with a table, which is split if asked to, and its loss; some targets are right."""
    torch.manual_seed(0)
    model = Straight()
    with torch.no_grad():
        model.embed.weight[IDS[:, :-1]] += 2 * model.lm_head.weight[IDS[:, 1:]]
    TABLES[table](model)
    loss = fused_loss_(model, shift=True, **options)
    if shard is not None:
        fsdp.fully_shard(model, **shard)
    return model, model, loss


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def message(attempt):
    """What an attempt is refused with."""
    with pytest.raises((ConfigurationError, UnsupportedError)) as error:
        attempt()
    return str(error.value)


CONTROLS = {
    "above": {"slack": 1.01, "decay": 0.5, "centering": 0.3},
    "both": {"side": "both", "decay": 0.2, "centering": 0.0},
    "fixed": {"scale": "fixed", "slack": 1.0, "decay": 0.5, "excluded": [0, 31, -1]},
}


class Output(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm_head = nn.Linear(16, 61, bias=False)

    def forward(self, features):
        return self.lm_head(features)


def controlled(name, shard=False, of=lambda model: model, before=False):
    """A table of 61 rows, of which two workers hold 31 and 30, after three steps of control."""
    torch.manual_seed(3)
    model = Output()
    model.lm_head.weight.data += 0.1
    control = SpectrumControl(of(model), every=1, **CONTROLS[name]) if before else None
    if shard:
        fsdp.fully_shard(model)
    control = control or SpectrumControl(of(model), every=1, **CONTROLS[name])
    for rate in (1.0, 0.5, 1.0):
        assert control.step(rate)
    if shard:
        assert len(model.lm_head.weight.to_local()) in (30, 31)
    return whole(model.lm_head.weight.detach())


def refuses_nan(rank):
    """No worker writes anything where a row of one of them is not finite."""
    model = Output()
    fsdp.fully_shard(model)
    control = SpectrumControl(model, every=1, decay=1.0)
    rows = model.lm_head.weight.to_local().detach()
    if rank == 1:
        rows[-1, 3] = float("nan")
    before = rows.clone()
    with pytest.raises(DataError, match="finite"):
        control.step()
    assert torch.equal(model.lm_head.weight.to_local().nan_to_num(), before.nan_to_num())


def _one_worker(rank):
    half, targets = IDS.chunk(2)[rank], IDS[:, 1:].numel()
    found = {name: trained(name, {}, half, targets / 2) for name in METHODS}
    split = {
        name: message(lambda name=name: trained(name, {"reshard_after_forward": True}, half))
        for name in METHODS
    }
    for table in TABLES:
        found[table, "tokens"] = outputs_of_tokens(
            functools.partial(told, table, {}), slice(rank, rank + 1), COUNT / 2
        )
    given = {
        "model": lambda m: m,
        "layer": lambda m: m.lm_head,
        "weight": lambda m: m.lm_head.weight,
    }
    for name, of in given.items():
        model = Straight()
        control = SpectrumControl(of(model), every=1)
        fsdp.fully_shard(model)
        model(half).sum().backward()
        if name == "weight":  # it is no longer that of the model
            split[f"control of the {name}"] = message(control.step)
        else:
            control.step()
    found["controls"] = {
        (name, before): controlled(name, True, before=before)
        for name in CONTROLS
        for before in (False, True)
    }
    found["controls"]["above", "layer"] = controlled("above", True, of=given["layer"])
    found["tied"] = {kind: tied(FACTORED[kind], half, True) for kind in FACTORED}
    refuses_nan(rank)
    model = Straight()
    weight_norm_(model)
    fsdp.fully_shard(model)
    split["plain_"] = message(lambda: plain_(model))
    return found, split


def _copied(rank):
    """A table of which each of two workers holds a copy, and whose eigensolvers disagree."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(3)
    model = Output()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "parts"))
    fsdp.fully_shard(model, mesh=mesh)
    control = SpectrumControl(model, every=1, **CONTROLS["both"])

    class Disagreeing(ControlRule):
        def plan(self, *given, **options):
            change = super().plan(*given, **options)
            return change._replace(shift=torch.full((16,), 0.1 * rank))

    control.rule = Disagreeing(**vars(control.rule))
    assert control.step()
    return whole(model.lm_head.weight.detach())


@needs_fully_shard
@pytest.mark.slow
def test_copies_of_a_split_table_stay_equal(tmp_path):
    first, second = on_two_workers(_copied, tmp_path)
    assert torch.equal(first, second)


def _taken_apart(rank, folder, names):
    """A sharded model with a table is trained with Muon, and becomes plain in several ways."""
    import transformers
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    found = {}
    for name in names:
        model = build(transformers)
        TABLES[name](model)
        loss = fused_loss_(model)
        for block in model.transformer.h:
            fsdp.fully_shard(block)
        fsdp.fully_shard(model)
        groups = parameter_groups(model, lr=0.1, table_lr=0.05)
        optimizer = Muon(groups, hidden_matrices(model), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss(model(IDS), IDS).backward()
            optimizer.step()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state, plain = get_model_state_dict(model, options=options), plain_state_dict(model)
        assert bool(plain) == (rank == 0)
        model.save_pretrained(f"{folder}/{name}, whole")
        model.save_pretrained(f"{folder}/{name}, given", state_dict=state)
        model.save_pretrained(f"{folder}/{name}, plain", state_dict=plain)
        table = whole_weight(model)  # as the callbacks measure it
        message_of_plain = message(lambda model=model: plain_(model)) if name != "plain" else ""
        found[name] = state, plain, table, message_of_plain
    return found


@needs_fully_shard
@pytest.mark.slow
def test_a_sharded_model_becomes_a_plain_one(transformers, tmp_path):
    """Bit for bit what one process makes of the same entries."""
    pytest.importorskip("transformers")
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    found, _ = on_two_workers(_taken_apart, tmp_path, str(tmp_path), list(TABLES))
    for name, (state, plain, table, refusal) in found.items():
        model = build(transformers)
        TABLES[name](model)
        model.load_state_dict(state)
        assert torch.equal(table, model.lm_head.weight)
        expected = model.eval()(IDS).logits
        assert "plain_state_dict(model)" in refusal or name == "plain"
        ways = {"whole": True, "given": True, "plain": False}
        for way, has_table in ways.items():
            loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / f"{name}, {way}")
            assert torch.equal(loaded.lm_head.weight, table)
            assert loaded.lm_head.weight is loaded.transformer.wte.weight
            named = hasattr(loaded.config, "spectral_fairseq")
            assert named == (has_table and name != "plain")
            restore_(loaded)
            torch.testing.assert_close(loaded.eval()(IDS).logits, expected, rtol=1e-5, atol=1e-5)
        plain_(model)
        whole = model.state_dict()
        assert whole.keys() == plain.keys()
        assert all(torch.equal(plain[key], entry) for key, entry in whole.items())


def test_hidden_states_show_their_tensors():
    """Before torch 2.13, fully_shard finds no others, and would reduce no gradient."""
    pytree = pytest.importorskip("torch.utils._pytree")
    if not hasattr(pytree, "register_pytree_node"):
        pytest.skip("this torch has no fully_shard")
    model = Straight()
    fused_loss_(model, shift=True)
    learned = torch.tensor(2.0, requires_grad=True)
    handed = model(IDS) * learned + torch.ones(model.lm_head.out_features)
    (features, bias, scale), how = pytree.tree_flatten({"logits": handed})
    assert features is handed.features and bias is handed.bias and scale is handed.scale
    again = pytree.tree_unflatten([features, bias, scale], how)["logits"]
    assert vars(again) == vars(handed)


@needs_fully_shard
@pytest.mark.slow
def test_fully_shard_of_the_root_after_the_methods(tmp_path):
    """The root keeps its parameters whole until the backward pass, so the loss sees the table."""
    workers = on_two_workers(_one_worker, tmp_path)
    for table in TABLES:
        expected = outputs_of_tokens(functools.partial(told, table), slice(None), COUNT)
        same_outputs_of_tokens([found[table, "tokens"] for found, _ in workers], expected)
    for gradients, split in workers:
        for method in METHODS:
            for name, expected in trained(method).items():
                torch.testing.assert_close(
                    gradients[method][name], expected, rtol=1e-5, atol=1e-6, msg=(method, name)
                )
        no_longer = split.pop("control of the weight")
        assert "none has (any more)" in no_longer and "Pass the model" in no_longer
        for kind, found in gradients["tied"].items():
            for name, expected in tied(FACTORED[kind], IDS).items():
                torch.testing.assert_close(found[name], expected, msg=(kind, name))
                assert len(expected) != WORDS or not found[name][PADDING].any()
        for (name, _), table in gradients["controls"].items():
            torch.testing.assert_close(table, controlled(name), rtol=0, atol=1e-6)
        assert len(split) == len(METHODS) + 1
        assert all("DTensor, split over devices" in text for text in split.values()), split
