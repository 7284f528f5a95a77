"""What every kind of table does, and that each declares itself completely."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from spectral_fairseq.embeddings import TABLES, FactoredEmbedding, PlainEmbedding, TableSpec
from spectral_fairseq.errors import CheckpointError, ConfigurationError
from spectral_fairseq.functional import autograd
from spectral_fairseq.functional.weight_norm_penalty import weight_norm_penalty
from spectral_fairseq.heads.adaptive import AdaptiveSoftmaxHead
from spectral_fairseq.heads.softmax import SoftmaxHead
from spectral_fairseq.options import arguments

PAD, FILLERS = 1, (35, 36)
COUNTS = [1, 1, 1, 1] + [3000 // k for k in range(1, 32)] + [0, 0]
FACTORED = [kind for kind in TABLES if issubclass(kind, FactoredEmbedding)]
# Relative and absolute error of a dense table that becomes one of another kind.
TOLERANCE = {"svd": (1e-5, 2e-6)}
OF_PRODUCTS = (1e-5, 2e-6)  # of kinds that give the nearest of some matrices

every_kind = pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.kind)
every_factored_kind = pytest.mark.parametrize("kind", FACTORED, ids=lambda kind: kind.kind)
# Others give the nearest of some matrices; test_entries.py has one.
every_exact_kind = pytest.mark.parametrize(
    "kind", [kind for kind in TABLES if kind.exact], ids=lambda kind: kind.kind
)
every_exact_factored_kind = pytest.mark.parametrize(
    "kind", [kind for kind in FACTORED if kind.exact], ids=lambda kind: kind.kind
)


def table(kind):
    torch.manual_seed(0)
    return kind.build(TableSpec(37, 5, PAD, FILLERS, COUNTS))


def dense(n=37, d=5, seed=1):
    weight = torch.randn(n, d, generator=torch.Generator().manual_seed(seed))
    weight[PAD] = 0
    return weight


def assert_equals(kind, found, expected):
    rtol, atol = TOLERANCE.get(kind.kind, (1e-6, 1e-7) if kind.exact else OF_PRODUCTS)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def test_kinds_have_different_names_and_entries():
    assert len({kind.kind for kind in TABLES}) == len(TABLES)
    assert len({frozenset(kind.entries) for kind in TABLES}) == len(TABLES)


@every_kind
def test_the_declared_entries_are_what_is_stored(kind):
    module = table(kind)
    assert set(kind.entries) == set(module.state_dict())
    assert kind.stored_shape(module.state_dict()) == (37, 5)
    assert kind.settings < set(kind.entries)
    assert module.excluded_rows.tolist() == [PAD, *FILLERS]


@every_kind
def test_a_table_gives_back_the_options_that_it_was_made_with(kind):
    """Saved models of torch record them, and are restored from them."""
    given = {}
    for entry in kind.options:
        value = 1 if isinstance(entry.default, int) else 0.25
        given[entry.argument] = entry.choices[-1] if entry.choices else entry.parsed(value)
    made = kind(37, 5, PAD, **given)
    assert made.chosen_options() == given
    assert kind(37, 5, PAD, **made.chosen_options()).chosen_options() == given


@every_kind
def test_what_readers_ask_of_a_kind_at_a_usual_size(kind):
    """Files are read, exported and averaged by what the kind declares, not by its first entry."""
    weight = dense(90, 64).double()
    stored = kind(90, 64, PAD).double().factor(weight)
    assert kind.stored_shape(stored) == (90, 64)
    nearest = kind.dense_rows(stored, torch.arange(90), torch.float64)
    again = kind.rebuilt(stored, PAD).double().factor_exactly(nearest, "the table")
    assert {name: value.shape for name, value in again.items()} == {
        name: value.shape for name, value in stored.items()
    }
    assert_equals(kind, kind.dense_rows(again, torch.arange(90), torch.float64), nearest)
    if kind.exact:
        assert_equals(kind, nearest, weight)


@every_kind
def test_the_declared_options_are_arguments_with_the_same_defaults(kind):
    parameters = inspect.signature(kind).parameters
    given = arguments(kind.options, type("Config", (), {o.name: o.default for o in kind.options}))
    for option in kind.options:
        assert parameters[option.argument].default == given[option.argument]
        assert not option.choices or option.default in option.choices
    assert kind.build(TableSpec(37, 5, PAD, FILLERS, COUNTS), **given).num_embeddings == 37


@every_kind
@pytest.mark.parametrize("shape", [(1,), (3, 4), (2, 0)])
def test_look_up_equals_the_dense_table(kind, shape):
    module = table(kind)
    tokens = torch.randint(0, 37, shape)
    expected = module.weight.double()[tokens]
    torch.testing.assert_close(module(tokens).double(), expected, rtol=1e-5, atol=1e-6)


@every_kind
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (4, 5), (5, 5), (3, 7, 5)])
def test_logits_equal_the_dense_product_for_few_and_for_many_tokens(kind, shape, bias):
    head = SoftmaxHead(table(kind), bias=bias)
    features = torch.randn(shape)
    expected = features.double() @ head.table.weight.double().t()
    if bias:
        torch.nn.init.normal_(head.bias)
        expected = expected + head.bias.double()
    torch.testing.assert_close(head(features).double(), expected, rtol=1e-5, atol=1e-5)
    rows, matrix = head.table.operands(features)
    product = rows.double() @ matrix.double().t()
    torch.testing.assert_close(
        product, expected - (head.bias.double() if bias else 0), rtol=1e-5, atol=1e-5
    )


@every_kind
@pytest.mark.parametrize("bias", [False, True])
def test_the_type_of_logits_does_not_depend_on_the_number_of_tokens(kind, bias):
    """Few tokens had logits of float32 under autocast, and many those of bfloat16."""
    head = SoftmaxHead(table(kind), bias=bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [head(torch.ones(count, 5)) for count in (1, 40)]
    assert [one.dtype for one in found] == [torch.bfloat16] * 2
    torch.testing.assert_close(found[0], found[1][:1], rtol=2e-2, atol=2e-2)


@every_kind
@pytest.mark.parametrize("count", [1, 40])
def test_features_out_of_order_take_one_product(kind, count):
    """As fairseq's decoders return them; torch would take a product, and a table, for each row."""
    frozen = table(kind).requires_grad_(False)
    features = torch.randn(1, count, 5).transpose(0, 1)
    with torch.no_grad(), torch.profiler.profile() as profiled:
        found = frozen.project(features)
        adaptive = AdaptiveSoftmaxHead(frozen, [9, 20]).requires_grad_(False)(features)
    assert not [event for event in profiled.events() if event.name == "aten::bmm"]
    assert_equals(kind, found, features[:, 0].mm(frozen.weight.t()).unsqueeze(1))
    assert adaptive.shape == found.shape


@every_kind
@pytest.mark.parametrize("length", [2, 4])
def test_gradcheck(kind, length):
    torch.manual_seed(0)
    module = kind.build(TableSpec(12, 3, PAD, counts=list(range(12)))).double()
    features, tokens = torch.randn(length, 3, dtype=torch.float64), torch.tensor([4, 4, 0])

    def loss(*_):  # gradcheck perturbs the parameters in place
        # Without the padding column: its gradient is masked on purpose.
        logits = module.project(features)[:, PAD + 1 :]
        return logits.exp().sum() + module(tokens).pow(3).sum()

    parameters = tuple(module.parameters())
    assert torch.autograd.gradcheck(loss, parameters, check_undefined_grad=False)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_stored_entries_equal_those_of_the_table(kind, dtype):
    module, rows = table(kind), torch.tensor([0, 7, 35])
    found = kind.dense_rows(module.state_dict(), rows, dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found, module.weight[rows].to(dtype), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@every_exact_kind
@pytest.mark.parametrize("n, d", [(37, 5), (130, 123)])
def test_from_a_dense_table_and_back_to_float_precision(kind, n, d):
    weight = dense(n, d)
    module = kind.from_dense(weight, PAD, excluded_rows=(n - 1,))
    assert_equals(kind, module.weight.detach(), weight)


@every_kind
def test_parameters_are_contiguous_for_flattening_optimisers(kind):
    for module in (table(kind), kind.from_dense(dense(5, 37).t(), PAD)):
        for parameter in module.parameters():
            parameter.view(-1)


@every_kind
def test_torchscript_gives_the_same_numbers(kind):
    module = table(kind).eval()
    scripted = torch.jit.script(SoftmaxHead(module))
    for length in (3, 9):
        features = torch.randn(length, 5)
        torch.testing.assert_close(scripted(features), module.project(features))
    tokens = torch.tensor([[3, PAD]])
    torch.testing.assert_close(torch.jit.script(module)(tokens), module(tokens))


@every_exact_factored_kind
def test_a_plain_checkpoint_is_factored_alike_under_each_name(kind):
    module, weight = table(kind), dense()
    state = {"encoder.weight": weight, "decoder.weight": weight.clone(), "other": weight}
    for name in ("encoder", "decoder"):
        module.upgrade_state_dict_named(state, name)
    assert "encoder.weight" not in state and "other" in state
    for key in module.state_dict():
        assert torch.equal(state[f"encoder.{key}"], state[f"decoder.{key}"])
        assert state[f"encoder.{key}"] is not weight
    module.load_state_dict(
        {k[len("encoder.") :]: v for k, v in state.items() if k.startswith("encoder.")}
    )
    assert_equals(kind, module.weight.detach(), weight)
    again = dict(state)
    module.upgrade_state_dict_named(again, "encoder")
    assert again.keys() == state.keys()


@every_factored_kind
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_gives_its_padding_row_no_gradient_either(kind, copied, frozen):
    module = copied(table(kind).requires_grad_(not frozen)).requires_grad_(True)
    module.project(torch.randn(9, module.embedding_dim)).logsumexp(1).sum().backward()
    grad = getattr(module, kind.entries[0]).grad
    assert grad.any() and not grad[PAD].any()


class Uses(nn.Module):
    """All uses of a table by a softmax, of few and of many tokens."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, features):
        logits = [self.table.project(some).logsumexp(-1).sum() for some in (features[:2], features)]
        return logits[0] + logits[1] + self.table.dense().square().sum()


def by_name(module, gradients):
    return dict(zip([name for name, _ in module.named_parameters()], gradients))


def backward(module, features):
    return by_name(module, torch.autograd.grad(module(features), [*module.parameters()]))


def second_derivatives(module, features):
    """Of a gradient penalty, which leaves out what has no first derivative."""
    parameters = [*module.parameters()]
    first = torch.autograd.grad(module(features), parameters, create_graph=True)
    kept = [one[PAD + 1 :] if len(one) == 37 else one for one in first]
    return by_name(module, torch.autograd.grad(sum(one.cos().sum() for one in kept), parameters))


def functional_call(module, features):
    given = {name: one.detach().clone().requires_grad_() for name, one in module.named_parameters()}
    value = torch.func.functional_call(module, given, (features,))
    return by_name(module, torch.autograd.grad(value, [*given.values()]))


def transformed(module, features):
    def value(given):
        return torch.func.functional_call(module, given, (features,))

    return torch.func.grad(value)({name: one.detach() for name, one in module.named_parameters()})


def checkpointed(module, features):
    from torch.utils.checkpoint import checkpoint

    checkpoint(module, features.requires_grad_(), use_reentrant=False).backward()
    return {name: one.grad for name, one in module.named_parameters()}


def compiled(module, features):
    torch._dynamo.reset()
    value = torch.compile(module, backend="aot_eager", fullgraph=True)(features)
    return by_name(module, torch.autograd.grad(value, [*module.parameters()]))


def scripted(module, features):
    return backward(torch.jit.script(module), features)


NEEDS_FUNC = pytest.mark.skipif(not hasattr(torch, "func"), reason="this torch has no torch.func")
NEEDS_COMPILER = pytest.mark.skipif(
    not hasattr(getattr(torch, "compiler", None), "is_compiling"),
    reason="torch.compile needs torch >= 2.1",
)


@every_factored_kind
@pytest.mark.parametrize(
    "way",
    [
        backward,
        second_derivatives,
        checkpointed,
        scripted,
        pytest.param(functional_call, marks=NEEDS_FUNC),
        pytest.param(transformed, marks=NEEDS_FUNC),
        pytest.param(compiled, marks=[NEEDS_COMPILER, pytest.mark.slow]),
    ],
)
def test_the_padding_row_alone_has_no_gradient(kind, way):
    """The others have that of a table without padding. The row is not zero, as a loaded one."""
    torch.manual_seed(0)
    module = Uses(kind.from_dense(torch.randn(37, 5), PAD)).eval()
    free, features = copy.deepcopy(module), torch.randn(9, 5)
    free.table.padding_idx = None
    reference = second_derivatives if way is second_derivatives else backward
    expected = reference(free, features)
    assert expected[f"table.{kind.entries[0]}"][PAD].any()
    for name, found in way(module, features).items():
        if len(found) == 37:
            assert not found[PAD].any(), name
            expected[name][PAD] = 0
        torch.testing.assert_close(found, expected[name], rtol=1e-5, atol=1e-6)


@every_factored_kind
def test_forward_derivatives_leave_the_padding_row_out_as_well(kind):
    """Autograd has none of a function whose gradient is by hand."""
    module, name = kind(37, 5, PAD).eval(), kind.entries[0]
    entry = module._parameters.pop(name).detach()
    tangent, features = torch.randn(37, 5), torch.randn(9, 5)
    with forward_ad.dual_level():
        setattr(module, name, forward_ad.make_dual(entry, tangent))
        found = forward_ad.unpack_dual(module.project(features)).tangent
    setattr(module, name, entry.requires_grad_())
    value = module.project(features).square().sum()
    (gradient,) = torch.autograd.grad(value, [entry])
    expected = (gradient * tangent).sum()
    torch.testing.assert_close((2 * module.project(features) * found).sum(), expected)


@every_factored_kind
def test_a_table_without_gradients_is_used_as_it_is_stored(kind, monkeypatch):
    """No operation stands between, which would end autocast's reuse of what it has converted."""
    module = table(kind)
    monkeypatch.setattr(autograd, "_RowWithoutGradient", None)
    with torch.no_grad():
        Uses(module)(torch.randn(9, 5))
    Uses(kind(37, 5, None))(torch.randn(9, 5)).backward()
    with pytest.raises(AttributeError):
        Uses(module)(torch.randn(9, 5))


@every_factored_kind
def test_nothing_of_the_size_of_a_table_is_copied_in_the_forward_pass(kind):
    module = kind(37, 5, PAD)
    if kind.kind != "weight-norm":  # which multiplies its rows by their lengths
        matrix, entry = module.operands(torch.randn(9, 5))[1], getattr(module, kind.entries[0])
        assert matrix.data_ptr() == entry.data_ptr() and matrix.requires_grad


@every_factored_kind
def test_another_shape_is_refused(kind):
    with pytest.raises(ConfigurationError, match="shape"):
        table(kind).upgrade_state_dict_named({"t.weight": torch.zeros(3, 5)}, "t")


@every_factored_kind
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(kind, bad):
    weight = torch.zeros(37, 5)
    weight[7, 3] = bad
    with pytest.raises(CheckpointError, match="t.weight.*infinity or NaN in 1 of 37 rows.*earlier"):
        table(kind).upgrade_state_dict_named({"t.weight": weight}, "t")


NEEDS_DEVICE_CONTEXT = pytest.mark.skipif(
    not hasattr(torch.device, "__enter__"), reason="torch.device is no context before torch 2.0"
)


@NEEDS_DEVICE_CONTEXT
@every_kind
def test_a_table_is_built_without_memory_and_loaded(kind):
    """As ``from_pretrained`` does it: on the meta device, then with the weights of a checkpoint."""
    expected = table(kind)
    with torch.device("meta"):
        head = SoftmaxHead(table(kind), bias=True)
    assert all(value.is_meta for value in [*head.parameters(), *head.buffers()])
    found = head.to_empty(device="cpu").table
    found.load_state_dict(expected.state_dict())
    assert torch.equal(found.weight, expected.weight)
    assert found.excluded_rows.tolist() == [PAD, *FILLERS]
    if kind.kind == "svd":
        assert torch.equal(found.prior(), expected.prior())
    found(torch.tensor([PAD, 5])).sum().backward()
    assert all(torch.isfinite(one.grad).all() for one in found.parameters() if one.grad is not None)


@NEEDS_DEVICE_CONTEXT
@every_kind
def test_parameters_that_take_the_place_of_others(kind):
    """By assign=True, as meta tables are filled: padding got gradients, constants no values."""
    if "assign" not in inspect.signature(torch.nn.Module.load_state_dict).parameters:
        pytest.skip("this torch has no load_state_dict(assign=True)")
    expected = table(kind)
    with torch.device("meta"):
        empty = table(kind)
    for found in (empty, copy.deepcopy(expected)):
        state = {name: value.clone() for name, value in expected.state_dict().items()}
        found.load_state_dict(state, assign=True)
        assert found.excluded_rows.tolist() == [PAD, *FILLERS]
        if kind.kind == "svd":
            assert torch.equal(found.prior(), expected.prior())
        for one in (found, expected):
            one.zero_grad()
            one.project(one(torch.tensor([PAD, 5]))).logsumexp(-1).sum().backward()
        for ours, theirs in zip(found.parameters(), expected.parameters()):
            torch.testing.assert_close(ours.grad, theirs.grad)
        assert kind.kind == "plain" or not getattr(found, kind.entries[0]).grad[PAD].any()
        found.to("cpu")


@NEEDS_DEVICE_CONTEXT
@every_kind
def test_a_table_is_built_without_memory_and_started(kind):
    """As FSDP does it: on the meta device, then by ``reset_parameters``."""
    with torch.device("meta"):
        found = table(kind)
    found = found.to_empty(device="cpu")
    for value in found.state_dict().values():
        value.fill_(float("nan"))  # empty memory may hold anything
    torch.manual_seed(3)
    found.reset_parameters(*([COUNTS] if kind.starts_from_counts else []))
    expected = table(kind)
    torch.manual_seed(3)
    expected.reset_parameters(*([COUNTS] if kind.starts_from_counts else []))
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value)
    assert not found.weight[PAD].any() and found.weight[5].any()


@every_kind
@pytest.mark.parametrize(
    "change", [lambda one: one.load_state_dict(one.state_dict()), lambda one: one.to("cpu")]
)
def test_training_goes_on_after_a_change_in_inference_mode(kind, change):
    """As a callback that validates with averaged weights makes it; constants could not be saved."""
    module = table(kind)
    with torch.inference_mode():
        change(module)
    assert not any(one.is_inference() for one in module.buffers())
    logits = module.project(module(torch.tensor([2, PAD])))
    penalty = weight_norm_penalty(module.weight.norm(dim=1), 1.0, module.excluded_rows)
    (logits.logsumexp(-1).sum() + penalty).backward()


@every_kind
def test_padding_that_is_counted_from_the_end(kind):
    found, expected = kind(37, 5, -1, [-3]), kind(37, 5, 36, [34])
    assert found.padding_idx == 36 and found.excluded_rows.tolist() == [34, 36]
    found.load_state_dict(expected.state_dict())
    weight = dense()
    for one in (kind.from_dense(weight, -37), kind.from_dense(weight, 0)):
        one.project(one(torch.tensor([0, 5]))).square().sum().backward()
        first = getattr(one, kind.entries[0])
        assert one.padding_idx == 0
        assert kind.kind == "plain" or not first.grad[0].any()


@every_kind
@pytest.mark.parametrize("row", [37, -38, 1.0])
def test_padding_that_is_no_row(kind, row):
    with pytest.raises(ConfigurationError, match="rows of a table of 37 rows; found"):
        kind(37, 5, row)


@every_factored_kind
def test_factors_may_have_no_padding(kind):
    made = kind(5, 5, None)
    assert made.padding_idx is None and made.excluded_rows.tolist() == []
    made.project(made(torch.arange(5))).square().sum().backward()
    assert getattr(made, kind.entries[0]).grad.ne(0).any(1).all()
    with pytest.raises(ConfigurationError, match="rows of a table of 37 rows; found None"):
        PlainEmbedding(37, 5, None)


@every_exact_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_dense_table_of_every_dtype_is_exact(kind, dtype):
    weight = dense().to(dtype)
    found = kind.from_dense(weight, PAD)
    assert found.weight.dtype == torch.float32
    assert_equals(kind, found.weight, weight.float())


def test_a_plain_table_of_pretrained_vectors_as_in_torch():
    """It failed with a TypeError about an argument of torch's own."""
    weight = dense()
    for freeze in (True, False):
        found = PlainEmbedding.from_pretrained(weight, freeze, padding_idx=PAD)
        expected = nn.Embedding.from_pretrained(weight, freeze, padding_idx=PAD)
        assert torch.equal(found.weight, expected.weight) and found.padding_idx == PAD
        assert found.weight.requires_grad == expected.weight.requires_grad
    with pytest.raises(ConfigurationError, match="padding_idx"):
        PlainEmbedding.from_pretrained(weight)


@every_exact_factored_kind
def test_a_plain_checkpoint_of_half_precision_is_restored_exactly(kind):
    weight = dense().half()
    state, found = {"table.weight": weight}, table(kind)
    found.upgrade_state_dict_named(state, "table")
    found.load_state_dict({key[len("table.") :]: value for key, value in state.items()})
    assert_equals(kind, found.weight, weight.float())
