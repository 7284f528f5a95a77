"""What works in which trainer: short programs, whose results are a table of docs/library.md.

``python -m tests.training.test_trainers`` prints the table.
"""

import contextlib
import functools
import os
import re
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed

from spectral_fairseq.analysis import training_measures
from spectral_fairseq.errors import UnsupportedError
from spectral_fairseq.training import (
    SpectrumControl,
    fused_loss_,
    plain_state_dict,
    weight_norm_,
)
from spectral_fairseq.training.callbacks import SpectralCallback
from spectral_fairseq.training.factored_layers import whole_weight
from tests.training.models import TEXT, build, prompts, rewards, tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "library.md"
ROWS = [{"input_ids": row, "labels": row} for row in TEXT]
STEPS = 2


# Each trains a model for two steps with SGD, and returns the names of what was logged.
def steps(model, control, optimizer, wrapped=None, backward=None):
    if control is not None:
        control.follow(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        ids = TEXT[4 * step : 4 * step + 4]
        loss = (wrapped or model)(input_ids=ids, labels=ids).loss
        loss.backward() if backward is None else backward(loss)
        optimizer.step()
    return {f"table/{name}" for name in training_measures(whole_weight(model))}


def loop(model, control, measure):
    del measure
    return steps(model, control, torch.optim.SGD(model.parameters(), lr=0.1))


def accelerate(model, control, measure):
    del measure
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    return steps(model, control, optimizer, wrapped, accelerator.backward)


@contextlib.contextmanager
def one_worker():
    """A group of gloo with this process alone."""
    with tempfile.NamedTemporaryFile() as file:
        store = torch.distributed.FileStore(file.name, 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()


def distributed(model, control, measure):
    del measure
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    return steps(model, control, torch.optim.SGD(model.parameters(), lr=0.1), wrapped)


def sharded(model, control, measure, reshard=None):
    del measure
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this torch has no fully_shard")
    for block in model.transformer.h:
        fsdp.fully_shard(block)
    fsdp.fully_shard(model, reshard_after_forward=reshard)
    return steps(model, control, torch.optim.SGD(model.parameters(), lr=0.1))


def arguments(kind, folder, **more):
    return kind(
        folder, max_steps=STEPS, per_device_train_batch_size=4, use_cpu=True, report_to=[],
        logging_steps=1, save_strategy="no", optim="sgd", learning_rate=0.1, max_grad_norm=0.0,
        disable_tqdm=True, lr_scheduler_type="constant", dataloader_pin_memory=False, **more,
    )  # fmt: skip


def logged(trainer):
    trainer.train()
    return {name for record in trainer.state.log_history if "loss" in record for name in record}


def trainer(model, control, measure):
    import transformers

    pytest.importorskip("accelerate")
    with tempfile.TemporaryDirectory() as folder:
        return logged(
            transformers.Trainer(
                model,
                arguments(transformers.TrainingArguments, folder),
                train_dataset=ROWS,
                callbacks=[SpectralCallback(control=control, measure_every=int(measure))],
            )
        )


def sft(model, control, measure):
    import transformers

    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"input_ids": row.tolist()} for row in TEXT])
    with tempfile.TemporaryDirectory() as folder:
        made = arguments(trl.SFTConfig, folder, bf16=False, gradient_checkpointing=False)
        callbacks = [SpectralCallback(control=control, measure_every=int(measure))]
        names = logged(
            trl.SFTTrainer(
                model,
                made,
                train_dataset=data,
                processing_class=tokenizer(transformers),
                callbacks=callbacks,
            )
        )
    assert "mean_token_accuracy" in names
    return names


def grpo(model, control, measure):
    import transformers

    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    with tempfile.TemporaryDirectory() as folder:
        made = arguments(
            trl.GRPOConfig, folder, bf16=False, gradient_checkpointing=False, beta=0.0,
            num_generations=4, max_completion_length=6,
        )  # fmt: skip
        return logged(
            trl.GRPOTrainer(
                model,
                rewards,
                made,
                train_dataset=datasets.Dataset.from_list(prompts()),
                processing_class=tokenizer(transformers),
                callbacks=[SpectralCallback(control=control, measure_every=int(measure))],
            )
        )


def lightning(model, control, measure):
    package = pytest.importorskip("lightning.pytorch")

    class Module(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, index):
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    names = set()
    with tempfile.TemporaryDirectory() as folder:
        logger = package.loggers.CSVLogger(folder)
        logger.log_metrics = lambda metrics, step=None: names.update(metrics)
        made = package.Trainer(
            max_steps=STEPS, accelerator="cpu", logger=logger, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False,
            callbacks=[SpectralCallback(control=control, measure_every=int(measure))],
        )  # fmt: skip
        made.fit(Module(), torch.utils.data.DataLoader(TEXT, batch_size=4))
    return names


TRAINERS = {
    "a loop of your own": loop,
    "accelerate": accelerate,
    "`Trainer`": trainer,
    "`SFTTrainer` of TRL": sft,
    "`GRPOTrainer` of TRL": grpo,
    "Lightning": lightning,
    "`DistributedDataParallel`": distributed,
    "`fully_shard`": sharded,
    "`fully_shard`, the root with `reshard_after_forward=True`": functools.partial(
        sharded, reshard=True
    ),
}
OF_GROUPS = ("Distributed", "fully_shard")
BEHIND = ("a loop", "accelerate", *OF_GROUPS)  # a control of a model is made by the user


# What is tried in each of them; the assertions say what "yes" means.
def with_table(transformers, train):
    model = build(transformers)
    weight_norm_(model)
    before = model.lm_head.weight.detach().clone()
    train(model, None, False)
    assert not torch.equal(whole_weight(model), before)


def with_fused_loss(transformers, train):
    expected = build(transformers)
    train(expected, None, False)
    model = build(transformers)
    fused_loss_(model)
    train(model, None, False)
    torch.testing.assert_close(whole_weight(model), whole_weight(expected), rtol=1e-4, atol=1e-5)


def with_control(transformers, train):
    model = build(transformers)
    control = SpectrumControl(every=1, slack=1.0, decay=1.0, centering=1.0)
    if train.is_yours:
        control.bind(model)
    train(model, control, False)
    assert control.updates == STEPS
    assert float(whole_weight(model).mean(0).norm()) < 1e-6


def with_measures(transformers, train):
    model = build(transformers)
    weight_norm_(model)
    assert "table/mean_cosine" in train(model, None, True)


def to_a_plain_model(transformers, train):
    model = build(transformers)
    weight_norm_(model)
    train(model, None, False)
    weight, plain = whole_weight(model), build(transformers)
    plain.load_state_dict(plain_state_dict(model))
    assert torch.equal(plain.lm_head.weight, weight)


FEATURES = {
    "`weight_norm_`": with_table,
    "`fused_loss_`": with_fused_loss,
    "`SpectrumControl`": with_control,
    "measures": with_measures,
    "`plain_state_dict`": to_a_plain_model,
}


def cell(transformers, name, feature):
    """What becomes of a program: "yes", or "refused" by name."""

    def train(model, control, measure):
        return TRAINERS[name](model, control, measure)

    train.is_yours = name.strip("`").startswith(BEHIND)
    group = one_worker() if name.strip("`").startswith(OF_GROUPS) else contextlib.nullcontext()
    with group:
        try:
            FEATURES[feature](transformers, train)
        except UnsupportedError:
            return "refused"
    return "yes"


def line(cells):
    return f"| {' | '.join(cells)} |"


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_the_table_of_trainers_is_what_happened(transformers, name):
    if not PAGE.exists():
        pytest.skip("the documents are not beside these tests")
    table = re.search(r"<!-- trainers -->\n(.*?)<!-- /trainers -->", PAGE.read_text("utf-8"), re.S)
    rows = table[1].splitlines()
    assert rows[0] == line(["", *FEATURES])
    (row,) = [row for row in rows if row.startswith(f"| {name} |")]
    assert row == line([name, *(cell(transformers, name, feature) for feature in FEATURES)])


@pytest.mark.slow
@pytest.mark.parametrize("train", [trainer, lightning])
def test_measures_of_tokens_stand_beside_those_of_the_table(transformers, train):
    """Lightning's loggers had those of the table alone."""
    model = build(transformers)
    fused_loss_(model, measures=True, z_loss=1e-4)
    names = {"z_loss", "entropy", "token_accuracy", "table/mean_cosine"}
    assert names <= train(model, None, True)


def main():
    """Print the table."""
    import transformers

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    print(line(["", *FEATURES]))
    print(line(["---"] * (1 + len(FEATURES))))
    for name in TRAINERS:
        print(
            line([name, *(cell(transformers, name, feature) for feature in FEATURES)]), flush=True
        )


if __name__ == "__main__":
    main()
