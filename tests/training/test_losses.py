"""Losses from hidden states equal the models' own, token by token and step by step."""

import copy
import functools
import inspect
import itertools
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from spectral_fairseq.errors import ConfigurationError, UnsupportedError
from spectral_fairseq.training import (
    TablePenalty,
    TokenLoss,
    fused_loss_,
    mixture_,
    plain_,
    weight_norm_,
)
from tests.covering import covering
from tests.reference import row_penalties as reference
from tests.training.models import (
    BERT,
    DIM,
    IDS,
    LABELS,
    LAYOUTS,
    T5,
    TABLES,
    WORDS,
    Straight,
    build,
    check_loss,
    each_table,
    gradients,
    inputs,
    made,
    outputs_of_tokens,
    same,
    same_outputs_of_tokens,
)
from tests.workers import on_two_workers


@pytest.mark.parametrize("layout, table", covering(LAYOUTS, TABLES))
def test_it_is_the_loss_of_the_model(transformers, layout, table):
    model = build(transformers, layout)
    TABLES[table](model)
    given = inputs(model, labels=LABELS)
    own = model(**{**given, "labels": LABELS}).loss
    own.backward()
    expected = gradients(model)
    logits = model(**given).logits.detach()
    loss = fused_loss_(model)
    outputs = model(**given)
    assert outputs.logits.shape == logits.shape and outputs.logits.features.size(-1) == DIM
    check_loss(model, loss(outputs, LABELS), own, expected)
    # Without gradients, and in evaluation, there are logits, of which the loss is the same.
    with torch.no_grad():
        torch.testing.assert_close(model(**given).logits, logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss(model.eval()(**given), LABELS), own, rtol=1e-6, atol=1e-6)


def test_generation_has_logits(transformers):
    model, plain = build(transformers), build(transformers).eval()
    fused_loss_(model)
    prompt = {"input_ids": IDS[:, :4], "attention_mask": torch.ones(2, 4, dtype=torch.long)}
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    for mode in (True, False):
        found = model.train(mode).generate(**prompt, **options)
        assert torch.equal(found, plain.generate(**prompt, **options))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("training", [True, False])
def test_tokens_are_counted_over_all_batches_of_a_step(transformers, smoothing, training):
    """Three batches of unequal numbers of targets are one large batch."""
    model = build(transformers).train(training)
    penalty = TablePenalty(model, cosine=0.5) if training else None
    loss = fused_loss_(model, label_smoothing=smoothing, penalty=penalty)
    labels = torch.cat([LABELS, IDS.flip(0), IDS])
    labels[4:, 4:] = -100
    ids = torch.cat([IDS, IDS.flip(0), IDS])
    total = labels[:, 1:].ne(-100).sum()
    total = int(total) if training else total  # Trainer has given both
    whole = loss(model(input_ids=ids), labels)
    whole.backward()
    expected = gradients(model)
    parts = []
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        part = loss(model(input_ids=ids[rows]), labels[rows], num_items_in_batch=total)
        part.backward()
        parts.append(part.detach())
    torch.testing.assert_close(sum(parts), whole.detach(), rtol=1e-6, atol=1e-6)
    same(gradients(model), expected)
    # Token by token, by definition.
    with torch.no_grad():
        log_p = model.eval()(input_ids=ids).logits[:, :-1].double().log_softmax(-1)
    targets = labels[:, 1:]
    naive = 0.0
    for row, word in zip(log_p.flatten(0, 1), targets.flatten().tolist()):
        if word != -100:
            others = sum(float(row[v]) for v in range(WORDS) if v != word) / (WORDS - 1)
            naive -= (1 - smoothing) * float(row[word]) + smoothing * others
    if penalty is not None:
        naive += float(total) * 0.5 * float(reference.cosine_penalty(model.lm_head.weight.detach()))
    assert math.isclose(float(whole.detach()), naive / float(total), rel_tol=1e-5)


def _gradients_of_a_half(rank, half):
    found = {}
    for table in TABLES:
        model, loss = _joint(table)
        wrapped = nn.parallel.DistributedDataParallel(model)
        # DistributedDataParallel takes the mean over workers: each counts half of the tokens.
        loss(wrapped(IDS[half[rank]]), LABELS[half[rank]], TARGETS / 2).backward()
        found[table] = gradients(model)
        found[table, "tokens"] = outputs_of_tokens(
            functools.partial(_told, table, nn.parallel.DistributedDataParallel),
            half[rank],
            TARGETS / 2,
        )
    return found


def _told(table, wrap=lambda model: model, **options):
    """A model with a table, as it is called and as it is, and its loss; some targets are right."""
    model = Scores(_unchanged, True)
    with torch.no_grad():
        model.embed.weight[IDS[:, :-1]] += 2 * model.lm_head.weight[IDS[:, 1:]]
    TABLES[table](model)
    loss = fused_loss_(model, shift=True, **options)
    return wrap(model), model, loss


TARGETS = int(LABELS.ne(-100).sum())


def _joint(table):
    model = Scores(_unchanged, True)
    TABLES[table](model)
    penalty = TablePenalty(model, cosine=0.5)
    return model, fused_loss_(model, penalty=penalty, label_smoothing=0.1)


def _unchanged(scores):
    return scores


@pytest.mark.slow
def test_two_workers_have_the_gradients_of_one_with_the_joint_batch(tmp_path):
    half = (slice(0, 1), slice(1, 2))  # of unequal numbers of targets
    workers = on_two_workers(_gradients_of_a_half, tmp_path, half)
    for table in TABLES:
        model, loss = _joint(table)
        loss(model(IDS), LABELS).backward()
        expected = gradients(model)
        for found in workers:
            same(found[table], expected)
        whole = outputs_of_tokens(functools.partial(_told, table), slice(None), TARGETS)
        same_outputs_of_tokens([found[table, "tokens"] for found in workers], whole)


class Scores(nn.Module):
    """A model that does something to its logits."""

    config = SimpleNamespace(is_encoder_decoder=True)

    def __init__(self, change, bias):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, DIM)
        self.lm_head = nn.Linear(DIM, WORDS, bias=bias)
        self.change = change

    def forward(self, ids):
        return self.change(self.lm_head(self.embed(ids)))


ADDED = torch.linspace(-1, 1, WORDS)
FOLLOWED = {
    "scaled": lambda s: s * 0.3,
    "divided": lambda s: s / 3,
    "scaled by a tensor": lambda s: torch.tensor(0.3) * s,
    "biased": lambda s: s + ADDED,
    "capped": lambda s: torch.tanh(s / 2.5) * 2.5,
    "capped at once": lambda s: torch.tanh(s) * 3.0,
    "capped otherwise": lambda s: 3 * (s * 0.5 + ADDED).tanh() * 2.0,
    "all of it": lambda s: ((2 * (ADDED + s.float()) / 4 + ADDED[None]) * 0.5).to(torch.float32),
}


def check_followed(model):
    """The fused loss and its gradients are those of the logits; returns the gradients."""
    own = F.cross_entropy(model(IDS).flatten(0, 1), LABELS.flatten())
    own.backward()
    expected = gradients(model)
    check_loss(model, fused_loss_(model)(model(IDS), LABELS), own, expected)
    return expected


@pytest.mark.parametrize("change", ["times", "over", "twice"])
def test_a_learned_scale_gets_its_gradient(change):
    """It was taken for a number, and never trained."""
    changes = {
        "times": lambda s: s * model.scale + ADDED,
        "over": lambda s: (s + ADDED) / model.scale,
        "twice": lambda s: 0.5 * (model.scale * s) * model.scale,
    }
    model = Scores(changes[change], True)
    model.scale = nn.Parameter(torch.tensor([1.0]))  # 1 is no reason to leave it out
    assert float(check_followed(model)["scale"].abs()) > 1e-3


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("change", FOLLOWED)
def test_what_models_do_to_logits_is_followed(change, bias):
    check_followed(Scores(FOLLOWED[change], bias))


NOT_FOLLOWED = {
    "capped twice": lambda s: torch.tanh(torch.tanh(s)),
    "capped by a tensor": lambda s: torch.tanh(s) * torch.tensor(3.0),
    "turned round behind a cap": lambda s: torch.tanh(s) * -3.0,
    "biased behind a cap": lambda s: torch.tanh(s) + ADDED,
    "softened": lambda s: s.softmax(-1),
    "cut": lambda s: s[..., :-1],
    "reshaped": lambda s: s.view(-1, WORDS),
    "a sum of logits": lambda s: s + s,
    "a multiple of a bias": lambda s: torch.add(s, ADDED, alpha=2),
    "a multiple of the logits": lambda s: torch.add(ADDED, s, alpha=2),
    "a number for each of so many positions": lambda s: s + ADDED[:, None],
    "words that are scaled": lambda s: s * ADDED,
    "negative": lambda s: -s,
    "lost": lambda s: F.cross_entropy(s, LABELS),
    "in place": lambda s: s.mul_(2),
    "elsewhere": lambda s: s.to("meta"),
}


@pytest.mark.parametrize("change", NOT_FOLLOWED)
def test_everything_else_is_refused(change):
    model = Scores(NOT_FOLLOWED[change], False)
    fused_loss_(model)
    with pytest.raises(UnsupportedError, match="logits that a model leaves as they are"):
        model(IDS)


@pytest.mark.parametrize("layout, table", covering(LAYOUTS, ["plain", "weight norm"]))
def test_labels_given_to_the_model_have_this_loss_too(transformers, layout, table):
    """As TRL, accelerate, peft and a Trainer without compute_loss_func give them."""
    model, plain = build(transformers, layout), build(transformers, layout)
    plain.load_state_dict(model.state_dict())
    TABLES[table](model)
    fused_loss_(model)
    given = {**inputs(model), "labels": LABELS}
    takes_totals = "loss_function" in inspect.unwrap(type(model).forward).__code__.co_names
    for more in ({}, {"num_items_in_batch": torch.tensor(40)})[: 1 + takes_totals]:
        bare, found = plain(**given, **more), model(**given, **more)
        assert found.keys() == bare.keys()
        own = bare.loss
        torch.testing.assert_close(found.loss, own, rtol=1e-6, atol=1e-6)
        assert type(found.logits).__name__ == "HiddenStates"
    found.loss.backward()
    found = gradients(model)
    if table == "plain":
        own.backward()
        same(found, gradients(plain))
    copied = copy.deepcopy(model)
    torch.testing.assert_close(copied(**given).loss, model(**given).loss)
    plain_(model)
    assert model.loss_function.__module__.startswith("transformers")
    torch.testing.assert_close(model(**given).loss, plain(**given).loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout, change, works", [
    ("gpt2", lambda model: None, True),
    ("gpt2", weight_norm_, False),
    ("marian", lambda model: None, False),
])  # fmt: skip
def test_data_parallel_copies_of_what_refers_to_the_original_are_refused(
    transformers, layout, change, works
):
    """DataParallel copies every module of a model to each GPU, with references as they are."""

    def copies(model):
        return [module._replicate_for_data_parallel() for module in model.modules()]

    model = build(transformers, layout)
    change(model)
    fused_loss_(model)
    if works:
        copies(model)
    else:
        with pytest.raises(UnsupportedError, match="one process for each GPU"):
            copies(model)
    plain_(model)
    copies(model)


def test_a_model_that_masks_the_padding_that_it_makes_of_labels(transformers):
    """EncoderDecoderModel does so where it is given labels and no inputs of the decoder."""
    sides = [transformers.BertConfig(vocab_size=WORDS, **BERT) for _ in range(2)]
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*sides)
    config.decoder_start_token_id, config.pad_token_id = 2, 0
    model = transformers.EncoderDecoderModel(config=config).train()
    given = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": LABELS}
    own = model(**given).loss
    own.backward()
    expected = gradients(model)
    seen = torch.ones_like(IDS)
    unmasked = model(**given, decoder_attention_mask=seen).loss
    assert abs(float((unmasked - own).detach())) > 1e-6
    fused_loss_(model)
    check_loss(model, model(**given).loss, own, expected)
    found = model(**given, decoder_attention_mask=seen).loss
    torch.testing.assert_close(found, unmasked, rtol=1e-6, atol=1e-6)


def test_a_wrapper_around_the_forward_pass_outlives_the_loss(transformers):
    """accelerate keeps the forward pass that it found, for mixed precision."""
    model, plain = build(transformers, "t5"), build(transformers, "t5")
    fused_loss_(model, label_smoothing=0.3)
    loaded = pickle.loads(pickle.dumps(model))
    given = {**inputs(model), "labels": LABELS}
    smoothed, own = model(**given).loss, plain(**given).loss
    torch.testing.assert_close(loaded(**given).loss, smoothed)
    assert abs(float((smoothed - own).detach())) > 1e-4
    found = model.forward
    model.forward = lambda *args, **kwargs: found(*args, **kwargs)
    torch.testing.assert_close(model(**given).loss, smoothed)
    plain_(model)
    torch.testing.assert_close(model(**given).loss, own)


@pytest.mark.parametrize("first", [fused_loss_, weight_norm_])
def test_methods_of_the_model_alone_are_called_and_come_back(transformers, tmp_path, first):
    """They were those of the class, from then on."""
    model, calls = build(transformers, "t5"), []
    own = {"save_pretrained": lambda *args, **kwargs: calls.append((args, {*kwargs}))}
    own["get_output_embeddings"] = lambda: model.lm_head
    own["forward"] = functools.partial(type(model).forward, model)
    own["_loss_function"] = lambda logits, labels, **_: logits.sum()
    for name in ("tie_weights", "resize_token_embeddings", "set_output_embeddings"):
        own[name] = functools.partial(getattr(type(model), name), model)
    model.__dict__.update(own)
    for method in (first, fused_loss_):
        method(model)
        model.save_pretrained(tmp_path)
        assert calls.pop() == ((tmp_path,), {"state_dict"})
        assert model.get_output_embeddings() is model.lm_head
    plain_(model)
    assert {name: model.__dict__.get(name) for name in own} == own


def test_labels_that_the_loss_cannot_take(transformers):
    model = build(transformers)
    loss = fused_loss_(model)
    with pytest.raises(ConfigurationError, match="labels"):
        loss(model(input_ids=IDS), None)
    with pytest.raises(ConfigurationError, match="indices of words.*float32"):
        TokenLoss(model, shift=True)(model.eval()(input_ids=IDS), IDS.float())
    with pytest.raises(ConfigurationError, match="indices of words.*float32"):
        loss.log_probs(model(input_ids=IDS), IDS.float())  # which cut them off


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("label, named", [(WORDS, "largest label.*60"), (-1, "smallest label.*-1")])
def test_labels_that_are_no_words_are_named(label, named, training):
    """torch ended with an index that is out of bounds for dimension 1."""
    model = Scores(lambda s: s, True).train(training)
    loss = fused_loss_(model)
    labels = IDS.clone()
    labels[0, 4] = label
    for use in (loss, loss.log_probs) if training else (loss,):
        with pytest.raises(ConfigurationError, match=named):
            use(model(IDS), labels)
    loss.ignore_index = label
    assert math.isfinite(loss(model(IDS), labels))


def test_terms_of_a_loss_need_the_hidden_states():
    """A loss that was made without fused_loss_, or outlived it, left its penalties out."""
    model = Scores(lambda s: s, True)
    terms = [{"z_loss": 0.1}, {"by_probability": True}, {"penalty": TablePenalty(cosine=1.0)}]
    for options in terms:
        loss = TokenLoss(model, **options)
        with pytest.raises(UnsupportedError, match="a Scores that no layer of fused_loss_ made"):
            loss(model(IDS), IDS)
        with torch.no_grad():
            assert torch.equal(loss(model(IDS), IDS), TokenLoss(model)(model(IDS), IDS))
    loss = fused_loss_(model, z_loss=0.1)
    plain_(model)
    with pytest.raises(UnsupportedError, match="that no layer of fused_loss_ made"):
        loss(model(IDS), IDS)


@each_table
@pytest.mark.skipif(not hasattr(torch, "func"), reason="this torch has no torch.func")
def test_parameters_that_a_call_alone_was_given(table):
    """The loss took those of the model, in silence, and gave the others no gradient."""
    model = Straight(tied=True)
    TABLES[table](model)
    others = {name: (2 * one.detach()).requires_grad_() for name, one in model.named_parameters()}
    doubled = copy.deepcopy(model)
    with torch.no_grad():
        for one in doubled.parameters():
            one.mul_(2)
    expected = F.cross_entropy(doubled(IDS).flatten(0, 1), IDS.flatten())
    expected.backward()
    loss = fused_loss_(model, shift=False)
    with pytest.raises(UnsupportedError, match="functional_call"):
        loss(torch.func.functional_call(model, others, (IDS,)), IDS)

    class Trained(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, tokens):
            return loss(self.model(tokens), tokens)

    given = {f"model.{name}": one for name, one in others.items()}
    found = torch.func.functional_call(Trained(), given, (IDS,))
    torch.testing.assert_close(found, expected)
    found.backward()
    for name, one in doubled.named_parameters():
        torch.testing.assert_close(others[name].grad, one.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shift", [False, True])
def test_indices_of_any_type_are_labels(shift):
    """Types of 8 bits do not hold -100, which stands behind shifted labels."""
    model = Scores(lambda s: s, True)
    loss = fused_loss_(model, shift=shift)
    own = loss(model(IDS), IDS)
    for dtype in (torch.uint8, torch.int32):
        assert torch.equal(loss(model(IDS), IDS.to(dtype)), own)
        log_probs = loss.log_probs(model(IDS), IDS.to(dtype)).log_probs
        assert torch.equal(log_probs, loss.log_probs(model(IDS), IDS).log_probs)
    few = IDS % 2
    assert torch.equal(loss(model(IDS), few.bool()), loss(model(IDS), few))


class Readout(nn.Linear):
    """As of muP, whose factor depends on the width."""

    def forward(self, input):
        return super().forward(input * 0.5)


@pytest.mark.parametrize("method", [fused_loss_, lambda model: mixture_(model, 2)])
@pytest.mark.parametrize("table", [None, weight_norm_])
def test_a_layer_with_a_forward_pass_of_its_own_is_refused(method, table):
    model = Scores(lambda s: s, False)
    model.lm_head = Readout(DIM, WORDS, bias=False)
    if table is not None:
        table(model)
    with pytest.raises(UnsupportedError, match="forward pass is that of nn.Linear.*Readout"):
        method(model)


def _hooked(layer):
    """As ``device_map`` leaves the layers of a quantised model, or of one on several devices."""
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(layer, hooks.AlignDevicesHook(io_same_device=True))


METHODS = {
    "fused": lambda model: fused_loss_(model, shift=True),
    "cap": lambda model: fused_loss_(model, shift=True, softcap=0.5),
    "mixture": lambda model: mixture_(model, 2, shift=True),
    "table": weight_norm_,
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_a_layer_that_a_hook_of_accelerate_calls(method, first):
    """A mixture and a cap were left out in silence, and what was taken off went on."""
    model = Straight()
    expected, before = copy.deepcopy(model), model(IDS).detach()
    torch.manual_seed(1)
    METHODS[method](expected)
    if first:
        _hooked(model.lm_head)
    torch.manual_seed(1)
    METHODS[method](model)
    if not first:
        _hooked(model.lm_head)
    handed, other = model(IDS), expected(IDS)
    assert type(handed) is type(other)
    torch.testing.assert_close(model.eval()(IDS), expected.eval()(IDS), rtol=1e-6, atol=1e-7)
    if method in ("fused", "table"):
        plain_(model.train())
        torch.testing.assert_close(model(IDS), before, rtol=1e-6, atol=1e-6)


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight):
        return 2 * weight


def test_a_class_that_torch_derives_of_that_of_a_method_stays():
    """A parametrization was lost with the loss, and so was the weight of the layer."""
    model = Straight()
    with torch.no_grad():
        expected = 2 * model(IDS)
    loss = fused_loss_(model, shift=True)
    torch.nn.utils.parametrize.register_parametrization(model.lm_head, "weight", Doubled())
    with pytest.raises(RuntimeError, match="parametrized modules"):  # as without the loss
        pickle.dumps(model)
    dense = TokenLoss(model, shift=True)(expected, IDS)
    torch.testing.assert_close(loss(model(IDS), IDS), dense)
    assert fused_loss_(model, shift=True)(model(IDS), IDS) == loss(model(IDS), IDS)
    copies = hasattr(type(model.lm_head), "__deepcopy__")  # not before torch 1.13
    for one in (*([copy.deepcopy(model)] if copies else []), model):
        plain_(one)
        assert type(one.lm_head).__name__ == "ParametrizedLinear"
        torch.testing.assert_close(one(IDS), expected)
        torch.nn.utils.parametrize.remove_parametrizations(one.lm_head, "weight")
        assert type(one.lm_head) is nn.Linear


@pytest.mark.parametrize("method", ["fused", "cap", "mixture"])
def test_a_forward_pass_that_stands_before_that_of_the_class_is_refused(method):
    model = Straight()
    own = model.lm_head.forward
    model.lm_head.forward = lambda input: own(input)
    with pytest.raises(UnsupportedError, match="attribute `forward` is another function"):
        METHODS[method](model)


@pytest.mark.parametrize("kind", ["full_backward_pre", "full_backward"])
def test_a_hook_on_the_gradient_of_logits_is_refused(kind):
    """torch warned of the second kind, and left the gradient as it was."""
    model = Scores(lambda s: s, True)
    fused_loss_(model)
    register = getattr(model.lm_head, f"register_{kind}_hook", None)
    if register is None:
        pytest.skip("this torch has no such hooks")
    hook = register(lambda _, *gradients: gradients[0])
    with pytest.raises(UnsupportedError, match="backward hooks"):
        model(IDS)
    hook.remove()
    model(IDS)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("method", [fused_loss_, functools.partial(mixture_, components=2)])
def test_labels_of_another_batch_are_refused(method, training):
    """A mixture took the loss of as many positions as there were labels."""
    model = Straight()
    loss = method(model, shift=True)
    outputs = model.train(training)(IDS)
    for labels in (IDS[:1], torch.cat([IDS, IDS]), IDS[:, 0]):
        with pytest.raises(ConfigurationError, match="each of the 2 x 9 positions"):
            loss(outputs, labels)
        if method is fused_loss_:
            with pytest.raises(ConfigurationError, match="each of the 2 x 9 positions"):
                loss.log_probs(outputs, labels)
    loss(outputs, IDS)


def _experts(transformers, **settings):
    sizes = {"hidden_size": DIM, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "router_aux_loss_coef": 1.0}
    return made(transformers, "MixtralForCausalLM", **sizes, **heads, **experts, **settings)


def test_the_loss_of_the_experts_is_added(transformers):
    model = _experts(transformers, output_router_logits=True)
    own = model(input_ids=IDS, labels=LABELS)
    assert own.aux_loss.item() > 0.5
    loss = fused_loss_(model)
    torch.testing.assert_close(loss(model(input_ids=IDS), LABELS), own.loss)
    torch.testing.assert_close(model(input_ids=IDS, labels=LABELS).loss, own.loss)
    total = 4 * LABELS[:, 1:].ne(-100).sum()  # a quarter of the tokens of a step
    quarter = loss(model(input_ids=IDS), LABELS, num_items_in_batch=total)
    torch.testing.assert_close(4 * quarter, own.loss)
    with pytest.raises(ConfigurationError, match="aux_loss"):
        loss(model(input_ids=IDS, return_dict=False), LABELS)
    # Where the settings do not ask for it there is none.
    model = _experts(transformers)
    own = model(input_ids=IDS, labels=LABELS).loss
    torch.testing.assert_close(fused_loss_(model)(model(input_ids=IDS), LABELS), own)


def test_further_losses_of_a_model_are_refused_by_name(transformers):
    def build_switch(router):
        layers = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
        settings = {**T5, **layers, "num_experts": 2, "output_router_logits": router}
        return made(transformers, "SwitchTransformersForConditionalGeneration", **settings)

    with pytest.raises(UnsupportedError, match="z_loss.*output_router_logits = False"):
        fused_loss_(build_switch(True))
    model = build_switch(False)
    loss, given = fused_loss_(model), {"input_ids": IDS, "decoder_input_ids": IDS}
    assert loss(model(**given), IDS).isfinite()
    # A call can ask for them too.
    with pytest.raises(UnsupportedError, match="encoder_z_loss"):
        loss(model(**given, output_router_logits=True), IDS)


@each_table
@pytest.mark.parametrize("mixture", [False, True])
def test_a_batch_without_targets_changes_nothing(transformers, table, mixture):
    model = build(transformers)
    TABLES[table](model)
    more = {"penalty": TablePenalty(model, cosine=1.0), "label_smoothing": 0.1}
    loss = mixture_(model, 2, **more) if mixture else fused_loss_(model, **more)
    nothing = torch.full_like(IDS, -100)
    for total, training in itertools.product((None, 0, torch.tensor(0), 7), (True, False)):
        found = loss(model.train(training)(input_ids=IDS), nothing, num_items_in_batch=total)
        assert found.item() == 0
        found.backward()
        assert all(float(one.abs().max()) == 0 for one in gradients(model).values())


@pytest.mark.parametrize("smoothing", ["torch", "fairseq"])
@pytest.mark.parametrize("training", [True, False])
def test_label_smoothing_is_torchs_unless_fairseqs_is_named(transformers, smoothing, training):
    model = build(transformers).double().train(training)
    logits = model(input_ids=IDS).logits[:, :-1].flatten(0, 1)
    targets = LABELS[:, 1:].flatten()
    eps = 0.3 if smoothing == "torch" else 0.3 * WORDS / (WORDS - 1)
    expected = F.cross_entropy(logits, targets, label_smoothing=eps)
    expected.backward()
    slopes = gradients(model)
    found = fused_loss_(model, label_smoothing=0.3, smoothing=smoothing)(
        model(input_ids=IDS), LABELS
    )
    found.backward()
    torch.testing.assert_close(found, expected)
    same(gradients(model), slopes, close=1e-9)
    with pytest.raises(ConfigurationError, match="torch, fairseq"):
        fused_loss_(model, smoothing="other")


def test_a_model_that_does_not_tell_how_targets_lie():
    model = Scores(lambda scores: scores, False)
    model.config = None
    with pytest.raises(ConfigurationError, match="shift=True"):
        TokenLoss(model)
    shifted, straight = (TokenLoss(model, shift=shift) for shift in (True, False))
    expected = F.cross_entropy(model(IDS)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    torch.testing.assert_close(shifted(model(IDS), IDS), expected)
    expected = F.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten())
    torch.testing.assert_close(straight((model(IDS),), IDS), expected)


def test_hidden_states_that_lost_their_type_are_noticed(transformers):
    model = build(transformers)
    loss = fused_loss_(model)
    hidden = model(input_ids=IDS).logits.features
    with pytest.raises(ConfigurationError, match="width of the logits"):
        loss((hidden,), torch.full_like(IDS, WORDS - 1))


@pytest.mark.slow
def test_under_autocast_and_the_compiler(transformers):
    model = build(transformers)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        own = model(input_ids=IDS, labels=LABELS).loss
    exact = model(input_ids=IDS, labels=LABELS).loss
    loss = fused_loss_(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(input_ids=IDS)
    assert outputs.logits.dtype == torch.bfloat16
    torch.testing.assert_close(loss(outputs, LABELS), own, rtol=1e-3, atol=1e-3)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(loss(compiled(input_ids=IDS), LABELS), exact, rtol=1e-5, atol=1e-5)


def test_outputs_that_lightning_gives_another_type():
    """Its Fabric does so where the model is of 16 or 64 bits, and the loss took another model's."""
    outputs = pytest.importorskip("lightning_utilities.core.apply_func")
    model = Straight().double()
    loss = fused_loss_(model, shift=True)
    handed = model(IDS)
    expected = loss(handed, IDS)
    changed = outputs.apply_to_collection(handed, torch.Tensor, torch.Tensor.float)
    assert changed.features.dtype == torch.float32
    found = loss(changed, IDS)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    found.backward()
    assert bool(model.lm_head.weight.grad.any())
    # DistributedDataParallel with find_unused_parameters would take it for unused.
    shown = torch.nn.parallel.distributed._find_tensors(handed)
    assert any(one is model.lm_head.weight for one in shown)


@pytest.mark.parametrize("components", [0, 3])
@each_table
def test_hidden_states_that_autocast_has_left_in_16_bits(table, components):
    """As with OPT's last projection: a factored table and a mixture failed, others had float32."""
    model = Scores(lambda scores: scores, False)
    model.embed = nn.Sequential(model.embed, nn.Linear(DIM, DIM))  # its output is in bfloat16
    TABLES[table](model)
    loss = mixture_(model, components, shift=False) if components else None
    loss = loss or fused_loss_(model, shift=False)
    exact = loss(model(IDS), LABELS)
    exact.backward()
    expected = gradients(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        handed = model(IDS)
    assert handed.features.dtype == torch.bfloat16 == handed.dtype
    found = loss(handed, LABELS)
    found.backward()
    torch.testing.assert_close(found, exact, rtol=2e-2, atol=2e-2)
    same(gradients(model), expected, close=0.1)


CLASSIFIERS = ("ViTForImageClassification", "BeitForImageClassification")


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_classifiers_of_images(transformers, kind):
    """Their models hand the labels first, which were taken for the logits."""
    settings = {
        **{"hidden_size": DIM, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"intermediate_size": 32, "image_size": 8, "patch_size": 4, "num_labels": 20},
    }
    images, labels = torch.randn(4, 3, 8, 8), torch.randint(0, 20, (4,))

    def made_anew():
        torch.manual_seed(0)
        kind_ = getattr(transformers, kind)
        return kind_(kind_.config_class(**settings)).train()

    plain, model = made_anew(), made_anew()
    expected = plain(images, labels=labels).loss
    expected.backward()
    loss = fused_loss_(model, shift=False)
    check_loss(model, model(images, labels=labels).loss, expected, gradients(plain))
    torch.testing.assert_close(loss(model(images), labels), expected)
    evaluated = plain.eval()(images, labels=labels).loss
    torch.testing.assert_close(model.eval()(images, labels=labels).loss, evaluated)
    # Several classes at once: the model's own loss where there are logits, refused in training.
    several = torch.nn.functional.one_hot(labels, 20).float()
    for one in (plain, model):
        one.config.problem_type = None
    own = plain(images, labels=several).loss
    torch.testing.assert_close(model(images, labels=several).loss, own)
    with pytest.raises(ConfigurationError, match="several classes.*without fused_loss_"):
        model.train()(images, labels=several)


def test_outputs_with_logits_under_another_name(transformers):
    """It was a raw KeyError."""
    settings = {**BERT, "vocab_size": WORDS}
    torch.manual_seed(0)
    model = transformers.BertForPreTraining(transformers.BertConfig(**settings)).eval()
    expected = torch.nn.functional.cross_entropy(
        model(IDS).prediction_logits.flatten(0, 1), LABELS.flatten()
    )
    loss = fused_loss_(model, shift=False)
    model.train()
    with pytest.raises(ConfigurationError, match="prediction_logits, seq_rel.*prediction_logits"):
        loss(model(IDS), LABELS)
    torch.testing.assert_close(loss(model(IDS).prediction_logits, LABELS), expected)


def test_a_refusal_has_the_one_remedy_that_helps(transformers, trainer):
    """It named five, for Trainer, TRL, peft and loops alike."""
    model = build(transformers)
    fused_loss_(model)
    logits = model(IDS).logits
    remedies = {
        "of a loop": lambda: logits.argmax(-1),
        "of a function of torch": lambda: torch.softmax(logits, -1),
        "of Trainer's label smoothing": lambda: trainer(
            model, label_smoothing_factor=0.1, max_steps=1
        ).train(),
        "of a model": lambda: _classifier(transformers),
    }
    words = {
        "of a loop": r"loss\(model\(input_ids\), labels\)",
        "of a function of torch": r"loss\(model\(input_ids\), labels\)",
        "of Trainer's label smoothing": "label_smoothing to fused_loss_, and no",
        "of a model": "Train this model without fused_loss_",
    }
    for name, refused in remedies.items():
        with pytest.raises(UnsupportedError, match=words[name]) as error:
            refused()
        others = ("get_peft_model", "TRL", "compute_loss_func", "parallelize_module")
        assert not any(word in str(error.value) for word in others)


def _classifier(transformers):
    settings = {**BERT, "vocab_size": WORDS, "num_labels": 5}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**settings))
    fused_loss_(model, shift=False)
    model.train()(IDS, labels=torch.tensor([1, 2]))


@each_table
@pytest.mark.parametrize("layout", ["gpt2", "t5", "marian, scaled"])
def test_weights_and_measures_of_tokens(transformers, layout, table):
    """By the dense logits of the same model in evaluation mode, which it computes as ever."""
    model = build(transformers, layout).eval()
    TABLES[table](model)
    scores = model(**inputs(model)).logits.double().detach()
    loss = fused_loss_(model, measures=True)
    weights = torch.linspace(-1, 2, LABELS.numel()).view(LABELS.shape)
    shift = int(loss.positions.shift)
    labels, own = LABELS[:, shift:], scores[:, : LABELS.size(1) - shift]
    counted = labels.ne(-100)
    log_p = own.log_softmax(-1)
    targets = labels.masked_fill(~counted, 0).unsqueeze(-1)
    chosen = log_p.gather(-1, targets).squeeze(-1)
    expected = -(weights[:, shift:] * chosen)[counted].sum() / 11
    dense = loss(model(**inputs(model)), LABELS, 11, weights=weights)
    of_logits = loss.tokens
    model.train()
    found = loss(model(**inputs(model)), LABELS, 11, weights=weights)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dense, found, rtol=1e-5, atol=1e-5)
    entropy = -(log_p.exp() * log_p).sum(-1)
    right = own.argmax(-1).eq(targets.squeeze(-1))
    for tokens in (loss.tokens, of_logits, loss.log_probs(model(**inputs(model)), LABELS)):
        for mine, value in zip(tokens, (chosen, entropy, right)):
            mine = mine[:, : labels.size(1)]
            assert not mine[~counted].any()
            torch.testing.assert_close(
                mine[counted].double(), value[counted].double(), rtol=1e-5, atol=1e-5
            )
    weights[LABELS.eq(-100)] = math.nan  # such as a ratio of probabilities of padding
    for training in (True, False):
        again = loss(model.train(training)(**inputs(model)), LABELS, 11, weights=weights)
        torch.testing.assert_close(again, found, rtol=1e-5, atol=1e-5)
    accuracy = own.argmax(-1).eq(labels)[counted].double().mean()
    assert loss.means()["token_accuracy"] == pytest.approx(float(accuracy))
    assert loss.means()["entropy"] == pytest.approx(float(entropy[counted].mean()), rel=1e-5)


def test_means_are_those_of_the_latest_batch(transformers):
    model = build(transformers)
    loss = fused_loss_(model, z_loss=0.1)
    loss(model(**inputs(model)), LABELS)
    assert loss.means()["z_loss"] > 0
    loss(model.eval()(**inputs(model)), LABELS)  # evaluation has no such term
    assert loss.means() == {}


def test_gradients_of_a_function_of_log_probabilities(transformers):
    model, plain = build(transformers), build(transformers)
    loss = fused_loss_(model)
    advantages = torch.linspace(-1, 1, LABELS.numel()).view(LABELS.shape)

    def surrogate(log_probs, targets):
        ratio = (log_probs - log_probs.detach()).exp()
        return -(ratio * advantages[:, : ratio.size(1)])[targets].sum()

    counted = LABELS[:, 1:].ne(-100)
    found = loss.log_probs(model(input_ids=IDS), LABELS).log_probs[:, :-1]
    surrogate(found, counted).backward()
    log_p = plain(input_ids=IDS).logits[:, :-1].log_softmax(-1)
    targets = LABELS[:, 1:].masked_fill(~counted, 0).unsqueeze(-1)
    surrogate(log_p.gather(-1, targets).squeeze(-1), counted).backward()
    same(gradients(model), gradients(plain))


def test_a_loss_by_probability_is_that_of_dynamic_fine_tuning(transformers):
    model, plain = build(transformers), build(transformers)
    loss = fused_loss_(model, by_probability=True)
    loss(model(input_ids=IDS), LABELS).backward()
    counted = LABELS[:, 1:].ne(-100)
    log_p = plain(input_ids=IDS).logits[:, :-1].log_softmax(-1)
    targets = LABELS[:, 1:].masked_fill(~counted, 0).unsqueeze(-1)
    chosen = log_p.gather(-1, targets).squeeze(-1)[counted]
    (-chosen.exp().detach() * chosen).mean().backward()
    same(gradients(model), gradients(plain))
    with torch.no_grad():  # in evaluation it is the likelihood
        evaluated = loss(model(input_ids=IDS), LABELS)
    torch.testing.assert_close(evaluated, -chosen.mean().detach())


def test_mixtures_have_no_weights_or_measures_of_tokens(transformers):
    model = build(transformers)
    for options in ({"measures": True}, {"by_probability": True}):
        with pytest.raises(UnsupportedError, match="one softmax in the output layer"):
            mixture_(model, 2, **options)
    assert torch.equal(model(IDS).logits, build(transformers)(IDS).logits)  # as it was
    other = copy.deepcopy(model)
    loss = mixture_(other, 2)
    for options in ({"measures": True}, {"by_probability": True}, {"z_loss": 0.1}):
        with pytest.raises(UnsupportedError, match="one softmax"):
            fused_loss_(other, **options)
    with pytest.raises(UnsupportedError, match="one softmax in the output layer"):
        loss(other(input_ids=IDS), LABELS, weights=torch.ones(LABELS.shape))
    with pytest.raises(UnsupportedError, match="one softmax in the output layer"):
        loss.log_probs(other(input_ids=IDS), LABELS)
