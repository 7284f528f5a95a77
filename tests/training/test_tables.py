"""Tables on models that exist: every use sees them, and they come off without a trace."""

import copy
import gc
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

from spectral_fairseq.embeddings import SpectralNormEmbedding, SVDEmbedding, WeightNormEmbedding
from spectral_fairseq.errors import ConfigurationError, DataError, UnsupportedError
from spectral_fairseq.training import (
    SpectrumControl,
    TablePenalty,
    factor_,
    fused_loss_,
    mixture_,
    plain_,
    repair_,
    weight_norm_,
)
from spectral_fairseq.training.table_checks import check_has_owner
from tests.training.models import DIM, IDS, LAYOUTS, WORDS, Straight, build, inputs

METHODS = {"weight norm": weight_norm_, "factors": factor_}
KINDS = {"weight norm": WeightNormEmbedding, "factors": SVDEmbedding}


def traces(model):
    """All that a table could leave behind."""
    parameters = {
        f"{prefix}.{name}": id(one)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, one in module._parameters.items()
    }
    shared = {
        name: sorted(k for k, v in parameters.items() if v == i) for name, i in parameters.items()
    }
    return (
        [type(layer) for layer in model.modules()],
        [sorted(layer.__dict__) for layer in model.modules()],
        [list(layer._modules) for layer in model.modules()],
        list(model.state_dict()),
        [name for name, _ in model.named_parameters()],
        shared,
    )


def naive(kind, table):
    """The matrix by its definition, in float64."""
    if kind == "weight norm":
        v, g = table.v.detach().double(), table.g.detach().double()
        return torch.stack([g[k] * v[k] / v[k].norm() for k in range(len(v))])
    u, sigma, v = (one.detach().double() for one in (table.U, table.sigma, table.V))
    return u @ torch.diag(sigma) @ (v / table.v_scale).t()


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_uses_see_one_table_and_it_comes_off_again(transformers, layout, kind):
    model = build(transformers, layout)
    before, values = traces(model), copy.deepcopy(model.state_dict())
    expected = model(**inputs(model)).logits.detach()
    table = METHODS[kind](model)
    assert isinstance(table, KINDS[kind])
    uses = [name for name, layer in model.named_modules() if "_used_table" in layer.__dict__]
    # Before version 5 of transformers some names are of one layer.
    layers = {id(model.get_submodule(name)): name for name in reversed(LAYOUTS[layout][1])}
    assert sorted(uses) == sorted(layers.values())
    torch.testing.assert_close(model(**inputs(model)).logits, expected, rtol=1e-5, atol=1e-5)

    # One step of an optimiser, on a loss that needs every use.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(**inputs(model)).logits.square().mean().backward()
    assert all(one.grad is not None and one.grad.any() for one in table.parameters())
    optimizer.step()
    dense = naive(kind, table)
    for name in uses:
        seen = model.get_submodule(name).weight.detach()
        torch.testing.assert_close(seen.double(), dense, rtol=1e-5, atol=1e-6)
    trained = model(**inputs(model)).logits.detach()
    assert (trained - expected).abs().max() > 1e-3

    plain_(model)
    assert traces(model) == before
    for name in uses:
        seen = model.get_submodule(name).weight.detach()
        torch.testing.assert_close(seen.double(), dense, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model(**inputs(model)).logits, trained, rtol=1e-5, atol=1e-5)
    assert {name: one.shape for name, one in values.items()} == {
        name: one.shape for name, one in model.state_dict().items()
    }


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_the_definition(transformers, layout, kind):
    """The chain rule from the plain model's gradient of W, look-ups and softmax together."""
    plain, model = build(transformers, layout), build(transformers, layout)
    plain(**inputs(plain)).logits.square().sum().backward()
    weight = plain.get_output_embeddings().weight
    table = METHODS[kind](model)
    model(**inputs(model)).logits.square().sum().backward()
    found = [one.grad for one in table.parameters()]
    for one in table.parameters():
        one.grad = None
    table.dense().backward(weight.grad)
    for mine, expected in zip(found, (one.grad for one in table.parameters())):
        torch.testing.assert_close(
            mine, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())
        )


def test_lengths_from_counts_keep_the_directions(transformers):
    model = build(transformers)
    directions = nn.functional.normalize(model.lm_head.weight.detach(), dim=1)
    counts = list(range(WORDS))
    table = weight_norm_(model, counts, sigma=0.2, init_range=0.3)
    expected = 0.2 * torch.tensor([max(c, 1) for c in counts]).double().log1p()
    torch.testing.assert_close(table.norms().double(), expected, rtol=1e-6, atol=1e-6)
    seen = nn.functional.normalize(model.lm_head.weight.detach(), dim=1)
    torch.testing.assert_close(seen, directions, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(table.v.norm(dim=1), torch.full((WORDS,), 0.3 * (DIM / 3) ** 0.5))


@pytest.mark.parametrize("zero", [True, False])
def test_lengths_from_counts_leave_the_padding_as_it_is(zero):
    """The look-up of padding, which begins at zero and gets no gradient, became a vector."""
    embed, lm_head = nn.Embedding(WORDS, DIM, 3), nn.Linear(DIM, WORDS, bias=False)
    lm_head.weight = embed.weight
    if not zero:
        nn.init.normal_(embed.weight[3:4])
    before = embed.weight[3].detach().clone()
    model = nn.ModuleDict({"embed": embed, "lm_head": lm_head})
    weight_norm_(model, [*range(1, WORDS), 1], sigma=0.2)
    torch.testing.assert_close(embed.weight[3].detach(), before)
    torch.testing.assert_close(embed(torch.tensor([3]))[0].detach(), before)


@pytest.mark.parametrize("kind", METHODS)
def test_copies_and_files_keep_one_table(transformers, kind):
    model = build(transformers)
    METHODS[kind](model)
    expected = model(**inputs(model)).logits
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(**inputs(model)).logits, expected)
        table = copied.transformer.wte.table
        assert copied.lm_head.used_table is table is not model.transformer.wte.table
        with torch.no_grad():
            next(table.parameters()).zero_()
        assert not copied.lm_head.weight.any() and model.lm_head.weight.any()
        plain_(copied)
        assert copied.lm_head.weight is copied.transformer.wte.weight
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    other = build(transformers, seed=5)
    METHODS[kind](other)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(**inputs(model)).logits, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", METHODS)
def test_ways_of_training(transformers, kind):
    model = build(transformers)
    METHODS[kind](model)
    plain = build(transformers)
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    expected = {name: one.grad.clone() for name, one in model.named_parameters()}
    compiled = torch.compile(model, backend="aot_eager")
    compute = {
        "compiled": lambda: compiled(input_ids=IDS, labels=IDS).loss,
        "checkpointed": lambda: model(input_ids=IDS, labels=IDS).loss,
    }
    for way, run in compute.items():
        if way == "checkpointed":
            model.gradient_checkpointing_enable()
        model.zero_grad()
        found = run()
        found.backward()
        torch.testing.assert_close(found, loss, rtol=1e-5, atol=1e-5)
        for name, one in model.named_parameters():
            torch.testing.assert_close(one.grad, expected[name], rtol=1e-3, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = [one(input_ids=IDS, labels=IDS).loss for one in (model, plain)]
    torch.testing.assert_close(*mixed, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("kind", METHODS)
def test_on_the_device_meta(transformers, kind):
    source = build(transformers)
    METHODS[kind](source)
    with torch.device("meta"):
        model = build(transformers)
        METHODS[kind](model)
    assert all(one.is_meta for one in model.parameters())
    model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict())
    with pytest.raises(UnsupportedError, match="meta"), torch.device("meta"):
        weight_norm_(build(transformers), [2.0] * WORDS)
    with pytest.raises(UnsupportedError, match="repair_; found .* meta"), torch.device("meta"):
        repair_(build(transformers))
    # Buffers that no checkpoint holds are a matter of transformers; the table has its own.
    assert torch.equal(model.lm_head.weight, source.lm_head.weight)


@pytest.mark.skipif(not hasattr(torch.device, "__enter__"), reason="torch 2.0 is the first")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_default_device_and_type_are_not_those_of_the_model(dtype):
    """They were taken for new tables, and the random numbers of ``factor_`` need 32 bits."""
    found = []
    for device, kind in (("cpu", torch.float32), ("meta", dtype)):
        torch.manual_seed(0)
        models = [Straight() for _ in range(4)]
        counts = torch.arange(1, WORDS + 1).tolist()
        torch.set_default_dtype(kind)
        try:
            with torch.device(device):
                weight_norm_(models[0], counts)
                factor_(models[1])
                weights = {"spectrum": 1.0, "cosine": 1.0, "weight_norm": 1.0}
                penalty = TablePenalty(models[1], **weights, norm_target=0.3)()
                mixture_(models[2], components=2, shift=False)
                models[3].lm_head.weight.data[5] = 0.0
                repair_(models[3])
        finally:
            torch.set_default_dtype(torch.float32)
        mixture = {id(one) for one in models[2].lm_head.mixture.parameters()}  # which is drawn
        kept = [one for model in models for one in model.parameters() if id(one) not in mixture]
        assert all(one.dtype == torch.float32 for model in models for one in model.parameters())
        models[2](torch.zeros(1, 2, dtype=torch.long))
        found.append([penalty, *kept])
    torch.testing.assert_close(*found)


def test_a_layer_alone_and_a_table_that_is_shared_outside_it():
    layer = nn.Embedding(30, 4)
    tokens = torch.arange(30)
    expected = layer(tokens).detach()
    table = weight_norm_(layer)
    torch.testing.assert_close(layer(tokens), expected)
    assert layer.table is table
    plain_(layer)
    assert type(layer) is nn.Embedding
    output = nn.Linear(4, 30, bias=False)
    output.weight = layer.weight
    for one in (layer, output):
        with pytest.raises(ConfigurationError, match="whole model"):
            weight_norm_(one)
    both = nn.ModuleDict({"look_up": layer, "lm_head": output})
    factor_(both)
    with pytest.raises(ConfigurationError, match="whole model"):
        plain_(layer)
    plain_(both)
    assert layer.weight is output.weight


def test_padding_has_no_gradient_from_look_ups_alone():
    layer = nn.Embedding(30, 4, padding_idx=3)
    plain = copy.deepcopy(layer)
    tokens = torch.tensor([3, 3, 5])
    table = weight_norm_(layer)
    assert table.excluded_rows.tolist() == [3]
    layer(tokens).sum().backward()
    assert not table.v.grad[3].any() and not table.g.grad[3].any() and table.g.grad[5] != 0
    plain(tokens).sum().backward()
    assert not plain.weight.grad[3].any()
    table.dense().sum().backward()  # as the softmax does, in which padding is a word
    assert table.g.grad[3] != 0


REFUSED = {
    "an optimiser that has it": lambda t, m: (m, torch.optim.SGD(m.parameters(), lr=1.0)),
    "wrapped": lambda t, m: (nn.DataParallel(m), None),
    "of 16 bits": lambda t, m: (m.bfloat16(), None),
    "frozen": lambda t, m: (m.requires_grad_(False), None),
    "put on twice": lambda t, m: (m, weight_norm_(m)),
    "sparse": lambda t, m: (nn.Embedding(30, 4, sparse=True), None),
    "renormalised": lambda t, m: (nn.Embedding(30, 4, max_norm=1.0), None),
    "parametrized": lambda t, m: (nn.utils.parametrizations.weight_norm(nn.Linear(4, 30)), None),
    "computed before a call": lambda t, m: (nn.utils.spectral_norm(nn.Linear(4, 30)), None),
    "without a table": lambda t, m: (nn.GRU(4, 4), None),
    "a raw parameter": lambda t, m: (_raw(m), None),
}


def _raw(model):
    model.other = nn.Module()
    model.other.shared = model.lm_head.weight
    return model


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_work_is_refused_before_anything_changes(transformers, what):
    model, kept = REFUSED[what](transformers, build(transformers))
    before = traces(model)
    for method in METHODS.values():
        with pytest.raises((ConfigurationError, UnsupportedError), match="expected .*; found"):
            method(model)
    assert traces(model) == before
    del kept


def test_what_would_break_the_tie_is_refused(transformers):
    model = build(transformers)
    table = weight_norm_(model)
    for change in (
        lambda: model.resize_token_embeddings(WORDS + 5),
        lambda: setattr(model.lm_head, "weight", nn.Parameter(torch.zeros(WORDS, DIM))),
        lambda: setattr(model.transformer.wte, "num_embeddings", 5),
    ):
        with pytest.raises(UnsupportedError, match=r"plain_\(model\)"):
            change()
    assert model.lm_head.used_table is table


@pytest.mark.parametrize("put_on", [weight_norm_, factor_, fused_loss_])
@pytest.mark.parametrize("layout", ["gpt2", "llama", "llama, tied", "t5"])
def test_a_table_is_not_resized_in_silence(transformers, layout, put_on):
    """An untied output layer became a plain one, and the method was gone."""
    model = build(transformers, layout)
    before = traces(model)
    put_on(model)
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(UnsupportedError, match=r"keeps its size.*plain_\(model\)"):
            one.resize_token_embeddings(WORDS + 5)
        assert one.get_output_embeddings().weight.size(0) == WORDS
    plain_(model)
    assert traces(model) == before
    model.resize_token_embeddings(WORDS + 5)
    put_on(model)
    assert model(**inputs(model)).logits.shape[-1] == WORDS + 5


WRITES = {
    "mul_": lambda layer: layer.weight.data.mul_(2),
    "add_": lambda layer: layer.weight.data.add_(1),
    "data": lambda layer: setattr(layer.weight, "data", torch.zeros(WORDS, DIM)),
    "__setitem__": lambda layer: layer.weight.detach().__setitem__(5, 0.0),
    "zero_": lambda layer: layer.weight.data[3:5].zero_(),
    "copy_": lambda layer: layer.weight.data.t().copy_(torch.zeros(DIM, WORDS)),
    "normal_": lambda layer: nn.init.normal_(layer.weight),
    "uniform_": lambda layer: nn.init.xavier_uniform_(layer.weight),
    "index_copy_": lambda layer: layer.weight.data.index_copy_(
        0, torch.tensor([2]), torch.ones(1, DIM)
    ),
    "_foreach_mul_": lambda layer: torch._foreach_mul_([layer.weight.data], 2.0),
    "requires_grad": lambda layer: setattr(layer.weight, "requires_grad", False),
    "requires_grad_": lambda layer: layer.weight.requires_grad_(False),
}


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_a_computed_weight_is_refused(kind, write):
    """It changed a tensor that was thrown away: initialisation of rows, masks, merging."""
    model = Straight()
    METHODS[kind](model)
    before = model.lm_head.weight.detach().clone()
    with torch.no_grad(), pytest.raises(UnsupportedError, match=f"`{write}` on it.*plain_"):
        WRITES[write](model.lm_head)
    assert torch.equal(model.lm_head.weight, before)
    # What only reads, or writes elsewhere, is as ever.
    weight = model.lm_head.weight
    own = weight.detach().clone().mul_(2)
    assert type(own) is torch.Tensor and torch.equal(own, 2 * before)
    assert torch.equal(torch.zeros(WORDS, DIM).copy_(weight.detach()), before)
    weight.square().sum().backward()
    assert model.lm_head.table.v.grad is not None if kind == "weight norm" else True
    file = io.BytesIO()
    torch.save(weight.detach(), file)
    file.seek(0)
    assert type(torch.load(file)) is torch.Tensor


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("tied", [False, True])
def test_freezing_the_output_layer_freezes_its_table(kind, tied):
    """Of a tied model the layer had no parameters of its own, so nothing was frozen."""
    for freeze in (
        lambda layer: layer.requires_grad_(False),
        lambda layer: [parameter.requires_grad_(False) for parameter in layer.parameters()],
    ):
        model = Straight(tied)
        table = METHODS[kind](model)
        freeze(model.lm_head)
        assert not any(entry.requires_grad for entry in table.parameters())
        names = [name for name, _ in model.lm_head.named_parameters()]
        assert names == [f"table.{entry}" for entry, _ in table.named_parameters()]
        plain_(model)
        assert not model.lm_head.weight.requires_grad
        assert list(dict(model.named_parameters())) == list(dict(Straight(tied).named_parameters()))


def test_a_table_of_which_one_factor_is_frozen_is_trained():
    model = Straight()
    factor_(model).U.requires_grad_(False)
    plain_(model)
    assert model.lm_head.weight.requires_grad


def trained(model, steps=60):
    """After some updates on words of which some are more frequent than others."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    shares = 1 / torch.arange(1, WORDS + 1).float()
    for _ in range(steps):
        words = torch.multinomial(shares, 64, True, generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(words), words.roll(1)).backward()
        optimizer.step()
    return model


def test_lengths_from_counts_are_for_new_tables():
    """They replaced those of a trained model without a word, and its logits were others."""
    counts = list(range(1, WORDS + 1))
    model = trained(Straight())
    before = traces(model)
    with pytest.raises(ConfigurationError, match="looks trained.*replace_trained=True"):
        weight_norm_(model, counts)
    assert traces(model) == before
    expected = model.lm_head.weight.detach().clone()
    weight_norm_(model)  # keeps the matrix
    torch.testing.assert_close(model.lm_head.weight.detach(), expected)
    plain_(model)
    weight_norm_(model, counts, replace_trained=True)
    lengths = model.lm_head.weight.detach().norm(dim=1)
    torch.testing.assert_close(lengths, 0.1 * torch.tensor(counts).float().log1p())


def test_fewer_words_than_dimensions_have_no_factors():
    with pytest.raises(ConfigurationError, match="N >= d.*N = 3 .*weight_norm_"):
        factor_(nn.Embedding(3, 8))
    with pytest.raises(ConfigurationError, match="N >= d.*N = 7 "):
        factor_(nn.Embedding(8, 8, padding_idx=1))


@pytest.mark.parametrize("padding", [None, 1])
def test_as_many_words_as_dimensions_have_factors(padding):
    """Such as 256 bytes in 256 dimensions: a row that is no padding was left out of the count."""
    layer = nn.Embedding(8 if padding is None else 9, 8, padding_idx=padding)
    expected = layer.weight.detach().clone()
    factor_(layer)
    torch.testing.assert_close(layer(torch.arange(len(expected))), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", METHODS)
def test_random_numbers_go_on_as_without_a_table(kind):
    """Dropout and the order of batches were other ones under a table that keeps the matrix."""
    model = Straight()
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    METHODS[kind](model)
    assert torch.equal(torch.rand(3), expected)


def test_a_mixture_has_no_plain_form(transformers):
    model = build(transformers)
    mixture_(model, 2)
    with pytest.raises(UnsupportedError, match="mixture"):
        plain_(model)


def test_a_table_and_a_fused_loss_come_off_in_one_call(transformers):
    for first, second in ((weight_norm_, fused_loss_), (fused_loss_, weight_norm_)):
        model = build(transformers)
        before = traces(model)
        first(model)
        second(model)
        model(**inputs(model)).logits.features.sum().backward()
        assert model.transformer.wte.table.g.grad is not None
        plain_(model)
        assert traces(model) == before


@pytest.mark.skipif(
    not hasattr(torch.optim.Optimizer, "register_step_post_hook"), reason="needs torch 2.0"
)
@pytest.mark.parametrize("kind", METHODS)
def test_an_optimiser_of_a_table_that_is_gone_is_refused(kind):
    """It stepped everything but the output table, without a word."""
    model = Straight(tied=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.freeze()  # so that the optimiser is not found
    try:
        check_has_owner(model.lm_head.weight, "what needs an owner")  # which is not found either
        METHODS[kind](model)
    finally:
        gc.unfreeze()
    with pytest.raises(UnsupportedError, match="after (weight_norm|factor)_; found SGD"):
        optimizer.step()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    plain_(model)
    with pytest.raises(UnsupportedError, match="after plain_; found SGD"):
        optimizer.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_table_that_is_not_finite_is_refused_from_every_way_in(number):
    layer = nn.Linear(DIM, WORDS, bias=False)
    layer.weight.data[3, 2] = number
    ways = [
        lambda: factor_(layer),
        lambda: weight_norm_(layer),
        lambda: weight_norm_(layer, counts=range(WORDS)),
        lambda: SpectrumControl(layer),
        *(
            lambda kind=kind: kind.from_dense(layer.weight, padding_idx=1)
            for kind in (SVDEmbedding, WeightNormEmbedding, SpectralNormEmbedding)
        ),
    ]
    for way in ways:
        with pytest.raises(DataError, match=f"finite numbers.*1 of {WORDS} rows"):
            way()
        assert type(layer) is nn.Linear


def test_what_is_no_model_is_refused_by_name():
    for function in (weight_norm_, factor_, fused_loss_, SpectrumControl):
        # A control without a model takes the one that is trained.
        for wrong in ("gpt2",) if function is SpectrumControl else (None, "gpt2"):
            with pytest.raises(ConfigurationError, match=f"type {type(wrong).__name__}"):
                function(wrong)
    with pytest.raises(ConfigurationError, match="type Tensor"):
        weight_norm_(torch.randn(WORDS, DIM))


def test_counts_of_other_forms():
    given = torch.arange(7, 7 + WORDS)
    expected = weight_norm_(nn.Linear(DIM, WORDS), given.tolist()).g
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(weight_norm_(nn.Linear(DIM, WORDS), given).g, expected)
        WeightNormEmbedding(WORDS, DIM, 1, counts=given)
    for wrong in (given.unsqueeze(0), torch.tensor(3), "counts"):
        with pytest.raises(DataError, match="`counts` as a sequence of numbers"):
            weight_norm_(nn.Linear(DIM, WORDS), wrong)
    some = list(range(WORDS - 1))
    for wrong in ([100] * WORDS, [0] * WORDS, [-1, *some], [float("nan"), *some]):
        for kind in (list, torch.tensor):
            with pytest.raises(DataError, match="torch.bincount"):
                weight_norm_(nn.Linear(DIM, WORDS), kind(wrong))
    with pytest.raises(DataError, match=f"found {WORDS} words, all with the count 100"):
        weight_norm_(nn.Linear(DIM, WORDS), [100] * WORDS)


@pytest.mark.parametrize("table", [weight_norm_, factor_])
def test_every_row_of_a_table_is_trained(table):
    """The first one was taken for padding, and had no gradient."""
    model = Straight()
    made = table(model)
    model(IDS).logsumexp(-1).sum().backward()
    gradient = getattr(made, made.entries[0]).grad
    assert gradient.abs().amax(1).gt(0).all()


def test_a_name_of_rows_is_no_sequence_of_names():
    with pytest.raises(ConfigurationError, match=r"the text 'zero'. Pass \('zero',\)"):
        repair_(Straight(), rows="zero")
