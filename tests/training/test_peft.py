"""Losses and tables on models that peft and TRL have changed."""

import copy
import warnings

import pytest
import torch

from spectral_fairseq.errors import ConfigurationError, UnsupportedError
from spectral_fairseq.training import (
    TablePenalty,
    factor_,
    fused_loss_,
    mixture_,
    plain_,
    weight_norm_,
)
from spectral_fairseq.training.hidden_states import HiddenStates
from tests.training.models import (
    DIM,
    IDS,
    LABELS,
    TABLES,
    build,
    each_table,
    gradients,
    prompts,
    rewards,
    same,
    tokenizer,
)


@pytest.fixture
def peft(transformers):
    return pytest.importorskip("peft")


def lora(peft, targets=("c_attn",), **options):
    options = {"lora_dropout": 0.0, **options}
    return peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=list(targets), **options)


KINDS = {
    "attention": lora,
    "the output layer": lambda peft: lora(peft, ("c_attn", "lm_head")),
    "the look-up": lambda peft: lora(peft, ("c_attn", "wte")),
    "a copy of the output layer": lambda peft: lora(peft, modules_to_save=["lm_head"]),
    "copies of both": lambda peft: lora(peft, modules_to_save=["lm_head", "wte"]),
    "prompt tuning": lambda peft: peft.PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3
    ),
    "prefixes": lambda peft: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def adapted(peft, transformers, kind, before=None):
    model = build(transformers)
    if before is not None:
        before(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        model = peft.get_peft_model(model, KINDS[kind](peft)).train()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():  # LoRA starts at zero
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [True, False])
def test_the_loss_of_an_adapted_model(peft, transformers, kind, first):
    if first and kind == "the output layer":
        pytest.skip("refused by name")
    plain = adapted(peft, transformers, kind)
    own = plain(input_ids=IDS, labels=LABELS).loss
    own.backward()
    expected = gradients(plain)
    model = adapted(peft, transformers, kind, fused_loss_ if first else None)
    loss = None if first else fused_loss_(model)
    outputs = model(input_ids=IDS, labels=LABELS)
    assert type(outputs.logits).__name__ == "HiddenStates"
    torch.testing.assert_close(outputs.loss, own, rtol=1e-6, atol=1e-6)
    outputs.loss.backward()
    same(gradients(model), expected)
    if loss is not None:
        torch.testing.assert_close(loss(model(input_ids=IDS), LABELS), own, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(
            model.eval()(input_ids=IDS).logits, plain.eval()(input_ids=IDS).logits
        )


def test_adapters_of_the_output_layer_can_be_switched_off(peft, transformers):
    model = adapted(peft, transformers, "the output layer")
    loss = fused_loss_(model)
    with model.disable_adapter():
        found = loss(model(input_ids=IDS), LABELS)
    own = build(transformers)(input_ids=IDS, labels=LABELS).loss
    torch.testing.assert_close(found, own, rtol=1e-6, atol=1e-6)
    for options in ({"lora_dropout": 0.1}, {"use_dora": True}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            other = peft.get_peft_model(build(transformers), lora(peft, ["lm_head"], **options))
        with pytest.raises(UnsupportedError, match="without dropout"):
            fused_loss_(other.train())
    with pytest.raises(UnsupportedError, match="peft.tuners.lora"):
        mixture_(model, 3)


def test_rows_of_a_batch_have_adapters_of_their_own(peft, transformers):
    model = build(transformers, "llama")
    chosen = lora(peft, ["lm_head", "q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, chosen)
    model.add_adapter("other", chosen)
    names = ["default", "other"]
    expected = model.eval()(input_ids=IDS, adapter_names=names).logits
    fused_loss_(model)
    assert torch.equal(model(input_ids=IDS, adapter_names=names).logits, expected)
    with pytest.raises(UnsupportedError, match="hidden states alone.*adapter_names"):
        model.train().base_model.model.lm_head(torch.ones(2, 3, DIM), adapter_names=names)


def test_an_adapter_around_a_fused_output_layer_is_refused(peft, transformers):
    model = adapted(peft, transformers, "the output layer", fused_loss_)
    with pytest.raises(UnsupportedError, match="after get_peft_model"):
        model(input_ids=IDS, labels=LABELS)


def test_what_uses_the_weight_alone_is_refused_where_it_loses_a_term(peft, transformers):
    """Trainable tokens multiply by a changed weight and never call the output layer."""
    for options, lost in (({}, False), ({"z_loss": 0.1}, True)):
        model = build(transformers)
        fused_loss_(model, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.get_peft_model(model, lora(peft, trainable_token_indices=[3])).train()
        if lost:
            with pytest.raises(UnsupportedError, match="no layer of fused_loss_ made"):
                model(input_ids=IDS, labels=LABELS)
        else:
            own = build(transformers)(input_ids=IDS, labels=LABELS).loss
            torch.testing.assert_close(model(input_ids=IDS, labels=LABELS).loss, own)


def test_a_table_on_the_copy_that_is_trained(peft, transformers):
    model = adapted(peft, transformers, "a copy of the output layer")
    before = model(input_ids=IDS).logits.detach()
    weight_norm_(model)
    loss = fused_loss_(model)
    loss(model(input_ids=IDS), LABELS).backward()
    assert any(name.endswith("table.v") for name in gradients(model))
    plain_(model)
    torch.testing.assert_close(model(input_ids=IDS).logits, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("copies", ["a copy of the output layer", "copies of both"])
@pytest.mark.parametrize("table", [weight_norm_, factor_])
def test_saved_adapters_have_the_plain_copy_and_the_table(
    peft, transformers, tmp_path, table, copies
):
    """They had the entries of the table alone, and no plain model took them."""
    model = adapted(peft, transformers, copies)
    table(model)
    fused_loss_(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(input_ids=IDS, labels=LABELS).loss.backward()
    optimizer.step()
    keys = list(model.state_dict())
    model.save_pretrained(tmp_path)
    assert list(model.state_dict()) == keys
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = peft.PeftModel.from_pretrained(build(transformers), tmp_path)
    expected = model.eval()(input_ids=IDS).logits
    torch.testing.assert_close(plain.eval()(input_ids=IDS).logits, expected, rtol=1e-5, atol=1e-5)
    resumed = adapted(peft, transformers, copies)
    table(resumed)
    resumed.load_adapter(tmp_path, "default", is_trainable=True)  # as Trainer does
    same(resumed.state_dict(), model.state_dict())


@pytest.mark.parametrize("table", [weight_norm_, factor_])
@pytest.mark.parametrize("target", ["lm_head", "wte"])
def test_an_adapter_is_not_lost_in_merging(peft, transformers, table, target):
    """It was added to a matrix that is computed anew at each use, and so was thrown away."""
    model = build(transformers)
    table(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"init_lora_weights": False}
        model = peft.get_peft_model(model, lora(peft, ["c_attn", target], **options)).eval()
        expected = model(input_ids=IDS).logits.detach()
        for merge in (model.merge_adapter, lambda: copy.deepcopy(model).merge_and_unload()):
            with pytest.raises(UnsupportedError, match=r"plain_\(model\) before it"):
                merge()
        if target == "wte":
            return
    plain_(model)
    model.lm_head.base_layer.weight = torch.nn.Parameter(
        model.transformer.wte.weight.detach().clone()  # peft would merge into both
    )
    merged = model.merge_and_unload().eval()
    torch.testing.assert_close(merged(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "named", [{"targets": ["lm_head"]}, {"target_parameters": ["lm_head.weight"]}]
)
@pytest.mark.parametrize("softcap", [None, 0.2])
def test_a_cap_and_a_loss_outlive_the_adapter(peft, transformers, softcap, named):
    """They were on the layer of peft alone, and merging left the cap out without a word.

    The loss then refused the logits of an evaluation, as those of another layer than peft's.
    """
    model = build(transformers, "llama")
    chosen = lora(peft, **{"targets": ["q_proj"], **named}, init_lora_weights=False)
    model = peft.get_peft_model(model, chosen).train()
    made = fused_loss_(model, softcap=softcap, z_loss=1e-4)
    loss = model(input_ids=IDS, labels=LABELS).loss
    expected = model.eval()(input_ids=IDS).logits
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=IDS).logits, expected, rtol=1e-5, atol=1e-6)
    outputs = merged.train()(input_ids=IDS, labels=LABELS)
    assert isinstance(outputs.logits, HiddenStates)
    torch.testing.assert_close(outputs.loss, loss, rtol=1e-5, atol=1e-6)
    assert merged.eval()(input_ids=IDS, labels=LABELS).loss < loss
    made.check_of(merged)
    if softcap is None:
        plain_(merged)
        assert type(merged.lm_head) is torch.nn.Linear


def test_a_table_under_trainable_tokens_is_refused_by_its_cause(peft, transformers):
    """The advice was to take off a method of this package, and none was on."""
    model = build(transformers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(model, lora(peft, trainable_token_indices=[3])).train()
    with pytest.raises(ConfigurationError, match="trainable tokens of peft.*merge_and_unload"):
        weight_norm_(model)


def _sft(transformers, folder, model, overrides=False, **options):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"input_ids": row.tolist()} for row in IDS.repeat(4, 1)])
    arguments = trl.SFTConfig(
        str(folder),
        max_steps=3,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        logging_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
        learning_rate=1e-2,
    )
    kind = trl.SFTTrainer
    if overrides:
        kind = type("Overriding", (kind,), {"compute_loss": transformers.Trainer.compute_loss})
    trainer = kind(
        model, arguments, train_dataset=data, eval_dataset=data,
        processing_class=tokenizer(transformers), **options,
    )  # fmt: skip
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return losses, trainer.evaluate()["eval_loss"]


def _trained(transformers, folder, *, table=None, as_function=False, **options):
    model = build(transformers)
    if table is not None:
        table(model)
    loss = fused_loss_(model, **options)
    given = {"compute_loss_func": loss} if as_function else {}
    return _sft(transformers, folder, model, **given)


@pytest.mark.slow
def test_sft_of_trl(transformers, tmp_path):
    """It computes a loss of its own from the output layer's weight unless it is given one."""
    own, evaluated = _sft(transformers, tmp_path, build(transformers))
    for table in (None, weight_norm_):
        for as_function in (False, True):
            losses, other = _trained(transformers, tmp_path, table=table, as_function=as_function)
            assert losses[0] == pytest.approx(own[0], rel=1e-5)
            if table is None:
                assert losses == pytest.approx(own, rel=1e-5)
                assert other == pytest.approx(evaluated, rel=1e-5)
    for options in ({"label_smoothing": 0.3}, {"z_loss": 0.1}, {"by_probability": True}):
        with pytest.raises(UnsupportedError, match="compute_loss_func to SFTTrainer"):
            _trained(transformers, tmp_path, **options)
        losses, _ = _trained(transformers, tmp_path, as_function=True, **options)
        assert abs(losses[0] - own[0]) > 1e-4
        model = build(transformers)
        fused_loss_(model, **options)
        overriding, _ = _sft(transformers, tmp_path, model, overrides=True)
        assert overriding == pytest.approx(losses, rel=1e-5)
    model = build(transformers)
    penalty = TablePenalty(model, cosine=1.0)
    fused_loss_(model, penalty=penalty)
    with pytest.raises(UnsupportedError, match="compute_loss_func to SFTTrainer"):
        _sft(transformers, tmp_path, model)
    # The entropy and the accuracy beside a right loss were those of another output layer.
    for put_on in (lambda model: mixture_(model, 2), lambda model: fused_loss_(model, softcap=0.1)):
        for as_function in (False, True):
            model = build(transformers)
            loss = put_on(model)
            given = {"compute_loss_func": loss} if as_function else {}
            with pytest.raises(UnsupportedError, match="mixture or a soft cap.*Use Trainer"):
                _sft(transformers, tmp_path, model, **given)


def _distilled(transformers, folder, model):
    """The losses of a student, whose teacher is another model."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    if not hasattr(trl, "DistillationTrainer"):
        pytest.skip("this trl has no DistillationTrainer")
    arguments = trl.DistillationConfig(
        str(folder), max_steps=1, report_to=[], use_cpu=True, bf16=False, save_strategy="no",
        logging_steps=1, per_device_train_batch_size=4, max_completion_length=4, disable_tqdm=True,
        gradient_checkpointing=False, seed=1,
    )  # fmt: skip
    trainer = trl.DistillationTrainer(
        model, build(transformers, seed=5), arguments,
        train_dataset=datasets.Dataset.from_list(prompts()),
        processing_class=tokenizer(transformers),
    )  # fmt: skip
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


@pytest.mark.slow
def test_distillation_of_trl(transformers, tmp_path):
    """It multiplies by the weight of the output layer, so mixtures and caps had no effect."""
    own = _distilled(transformers, tmp_path, build(transformers))
    for put_on in (weight_norm_, fused_loss_):
        model = build(transformers)
        put_on(model)
        assert _distilled(transformers, tmp_path, model) == pytest.approx(own, rel=1e-4)
    for put_on, found in (
        (lambda model: mixture_(model, 2), "mixture or a soft cap.*Use Trainer"),
        (lambda model: fused_loss_(model, softcap=0.1), "mixture or a soft cap.*Use Trainer"),
        (lambda model: fused_loss_(model, label_smoothing=0.3), "a loss of its own"),
    ):
        model = build(transformers)
        put_on(model)
        with pytest.raises(UnsupportedError, match=found):
            _distilled(transformers, tmp_path, model)


def _grpo(transformers, folder, model, log_probs=None):
    """Losses, norms of gradients and entropies of a GRPOTrainer, with log-probabilities of a user.

    Args:
        transformers: the package.
        folder: for its files.
        model: that is trained.
        log_probs: those and the entropies of the labels, from outputs; ``None`` for TRL's own.
    """
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")

    class Own(trl.GRPOTrainer):
        def _get_per_token_logps_and_entropies(
            self, model, input_ids, attention_mask, logits_to_keep, *args, **options
        ):
            if log_probs is None:
                return super()._get_per_token_logps_and_entropies(
                    model, input_ids, attention_mask, logits_to_keep, *args, **options
                )
            labels = input_ids.masked_fill(attention_mask == 0, -100)
            labels[:, :-logits_to_keep] = -100
            outputs = model(input_ids=input_ids, attention_mask=attention_mask)
            found = log_probs(outputs, labels)
            return *(one[:, :-1][:, -logits_to_keep:] for one in found), None

    arguments = trl.GRPOConfig(
        str(folder), max_steps=4, report_to=[], use_cpu=True, bf16=False, save_strategy="no",
        logging_steps=1, per_device_train_batch_size=4, num_generations=4, num_iterations=2,
        max_completion_length=6, gradient_checkpointing=False, learning_rate=0.5, optim="sgd",
        beta=0.0, seed=1, disable_tqdm=True,
    )  # fmt: skip
    trainer = Own(
        model, rewards, arguments, train_dataset=datasets.Dataset.from_list(prompts()),
        processing_class=tokenizer(transformers),
    )  # fmt: skip
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 4
    assert any(log["clip_ratio/region_mean"] for log in logs)
    return torch.tensor([[log[name] for name in NOTED] for log in logs])


NOTED = ("loss", "grad_norm", "entropy")


def _dense(outputs, labels):
    log_p = outputs.logits[:, :-1].log_softmax(-1)
    targets, counted = labels[:, 1:].clamp(min=0).unsqueeze(-1), labels[:, 1:].ne(-100)
    entropy = -(log_p.exp() * log_p).sum(-1)
    behind = torch.nn.functional.pad
    return [
        behind(one * counted, (0, 1)) for one in (log_p.gather(-1, targets).squeeze(-1), entropy)
    ]


@pytest.mark.slow
@each_table
def test_grpo_of_trl(transformers, tmp_path, table):
    """Step by step the losses of dense logits, by TRL's own pass and by those of the fused loss."""

    def made():
        model = build(transformers)
        TABLES[table](model)
        return model

    expected = _grpo(transformers, tmp_path, made(), _dense)
    model = made()
    loss = fused_loss_(model)
    found = _grpo(
        transformers, tmp_path, model, lambda outputs, labels: loss.log_probs(outputs, labels)[:2]
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    model = made()
    fused_loss_(model)
    torch.testing.assert_close(_grpo(transformers, tmp_path, model), expected, rtol=1e-5, atol=1e-6)
    model = made()
    fused_loss_(model, z_loss=0.1)
    with pytest.raises(UnsupportedError, match="such as GRPOTrainer, takes"):
        _grpo(transformers, tmp_path, model)


def test_trainer_with_a_model_that_reads_its_targets(transformers, trainer):
    """T5 makes its decoder's inputs from the labels, and computes its cross entropy itself."""
    model, plain = build(transformers, "t5"), build(transformers, "t5")

    def losses(model, loss=None):
        trained = trainer(model, loss, max_steps=2, logging_strategy="steps", logging_steps=1)
        trained.train()
        found = [log["loss"] for log in trained.state.log_history if "loss" in log]
        return [*found, trained.evaluate()["eval_loss"]]

    loss = fused_loss_(model)
    assert losses(copy.deepcopy(model)) == pytest.approx(losses(plain), rel=1e-5)
    with pytest.raises(ConfigurationError, match="Leave compute_loss_func out"):
        losses(model, loss)
