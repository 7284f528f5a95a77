"""Adaptive gradient gating as a criterion: the gated gradient, the counts, and their state."""

import copy
from types import SimpleNamespace

import pytest
import torch

from spectral_fairseq.errors import ConfigurationError
from spectral_fairseq.plugin import likelihood_gating as word_memory
from spectral_fairseq.plugin.criterion import WordCounts
from spectral_fairseq.plugin.find import output_matrix
from tests.plugin.conftest import (
    KINDS,
    LONGEST_FIRST,
    any_model,
    assert_close,
    build_criterion,
    build_model,
    gradients,
    make_sample,
    split,
)
from tests.plugin.trainers import build_trainer, same_models, save_in_epoch, take_updates
from tests.reference import losses as reference

ALPHA = 1.5  # two updates of a tiny batch: words with fewer than three targets are rare


def criterion_of(task, alpha=ALPHA, **options):
    options = {"label_smoothing": 0.1, **options}
    return build_criterion(task, "regularized_cross_entropy", gradient_gating=alpha, **options)


def sample_of(task, seed):
    """A batch in which some words are frequent."""
    sample = make_sample(task, sizes=LONGEST_FIRST, seed=seed)
    target = sample["target"]
    target[target > 24] = 7
    return sample


def filled(task, model, criterion, updates=2):
    """The criterion after some updates, at the start of the next one."""
    for update in range(updates):
        criterion.num_updates = update
        criterion(model, sample_of(task, update))
    criterion.num_updates = updates
    return criterion


def reference_gates(task):
    """The gates after the updates of `filled`."""
    dictionary = task.target_dictionary
    counts = sum(
        torch.bincount(sample_of(task, seed)["target"].flatten(), minlength=len(dictionary))
        for seed in (0, 1)
    )
    made_up = [i for i, word in enumerate(dictionary.symbols) if word.startswith("madeupword")]
    counts[dictionary.pad()] = 0
    gates = reference.gates(counts.tolist(), 2, ALPHA, {*range(dictionary.nspecial), *made_up})
    assert 0 < sum(gates[0]) < len(dictionary)
    return gates


def gated_naively(model, target, gates):
    """An output layer whose scores are gate s + (1 - gate) s.detach() as functions of W."""
    rare, first, second = gates
    gate = torch.tensor([second if rare[y] else first for y in target.flatten().tolist()])
    gate.scatter_(1, target.flatten().unsqueeze(1), 1.0)

    def output_layer(features):
        dense = output_matrix(model, gate.size(1))
        bias = getattr(getattr(model.decoder, "fc_out", None), "bias", None)
        of_table = torch.nn.functional.linear(features.detach(), dense)
        moving = gate.view(of_table.shape).to(of_table) * (of_table - of_table.detach())
        return torch.nn.functional.linear(features, dense.detach(), bias) + moving

    return output_layer


@pytest.mark.parametrize("name, sharing", [
    *((kind, {"share_all_embeddings": tied}) for kind in KINDS for tied in (True, False)),
    *((f"{arch} separate", {}) for arch in ("transformer", "lstm")),
])  # fmt: skip
def test_only_the_output_tables_gradient_is_gated_in_every_part_of_it(task, name, sharing):
    model = any_model(task, name, **sharing).double().train()
    with torch.no_grad():  # V is no identity, U is not orthonormal, and no sigma equals another
        for parameter in model.parameters():
            parameter += 0.1 * parameter.std() * torch.randn_like(parameter)
    sample, naive = sample_of(task, 5), copy.deepcopy(model)
    criterion = filled(task, copy.deepcopy(model), criterion_of(task))
    criterion.check_model(model)
    loss, _, log = criterion(model, sample)
    found = gradients(model, loss)
    naive.decoder.output_layer = gated_naively(naive, sample["target"], reference_gates(task))
    plain = build_criterion(task, "label_smoothed_cross_entropy", label_smoothing=0.1)
    naive_loss, _, naive_log = plain(naive, sample)
    expected = gradients(naive, naive_loss)
    torch.testing.assert_close(loss, naive_loss)
    torch.testing.assert_close(log["nll_loss"], naive_log["nll_loss"])
    assert_close(found, expected, rtol=1e-6, atol=1e-9)
    ungated = gradients(model, plain(model, sample)[0])
    assert not all(torch.allclose(found[key], ungated[key], atol=1e-4) for key in found)


@pytest.mark.parametrize("embedding_type", ["plain", "svd", "weight-norm"])
def test_alpha_of_zero_and_no_rare_word_are_the_plain_criterion(task, embedding_type):
    model = build_model(task, embedding_type=embedding_type).double().train()
    sample = sample_of(task, 5)
    plain = build_criterion(task, "label_smoothed_cross_entropy", label_smoothing=0.1)
    expected = gradients(model, plain(model, sample)[0])
    off = gradients(model, criterion_of(task, 0.0, loss_form="dense")(model, sample)[0])
    assert all(torch.equal(off[name], expected[name]) for name in expected)
    no_rare_word = gradients(model, criterion_of(task)(model, sample)[0])  # the first update
    assert_close(no_rare_word, expected, rtol=1e-5, atol=1e-7)
    gated = gradients(model, filled(task, model, criterion_of(task))(model, sample)[0])
    assert any(not torch.allclose(gated[name], expected[name], atol=1e-4) for name in expected)


@pytest.mark.parametrize("parts", [[[0], [1, 2]], [[2], [1], [0]]])
def test_how_an_update_is_cut_does_not_matter(task, parts):
    model = build_model(task).double().train()
    sample = sample_of(task, 5)
    whole, pieces = (filled(task, model, criterion_of(task, cosreg_weight=0.1)) for _ in range(2))
    expected = gradients(model, whole(model, sample)[0])
    found = gradients(model, sum(pieces(model, split(sample, rows))[0] for rows in parts))
    assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for criterion in (whole, pieces):
        criterion.num_updates += 1
        criterion(model, sample)
    assert torch.equal(whole.word_memory.total, pieces.word_memory.total)
    assert len(whole.word_memory) == len(pieces.word_memory) == 3


def test_the_memory_forgets():
    memory = word_memory.WordMemory(10, size=2)
    for update, words in enumerate(([1, 1, 5], [5], [9, 9], [])):
        memory.add(torch.tensor(words, dtype=torch.long), update)
    assert len(memory) == 2 and memory.total.tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 2]


def test_a_step_that_is_taken_again_is_counted_once():
    memory, words = word_memory.WordMemory(10, size=2), torch.tensor([2, 3, 3])
    memory.begin(0)
    memory.add(words, 0)
    memory.begin(0)  # the gradients overflowed
    memory.add(words[:1], 0)
    memory.add(words[1:], 0)  # another micro-batch
    memory.begin(1)
    memory.add(words[:1], 1)
    assert memory.total.tolist() == [0, 0, 1, 2, 0, 0, 0, 0, 0, 0]


def test_the_trainer_begins_each_step_anew(task):
    memory = (criterion := criterion_of(task)).word_memory
    trainer = SimpleNamespace(get_criterion=lambda: criterion, get_num_updates=lambda: 0)
    for _ in range(3):  # fairseq repeats a step that overflowed
        WordCounts(trainer).before_update()
        memory.add(torch.tensor([4]), 0)
    memory.add(torch.tensor([5]), 1)
    assert memory.total[4] == 1


def test_targets_of_a_larger_dictionary_are_refused():
    memory = word_memory.WordMemory(4, size=2)
    with pytest.raises(ConfigurationError, match="one target dictionary.*index 7.*4 words"):
        memory.add(torch.tensor([3, 7]), 0)


def test_counts_are_those_of_all_workers(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(word_memory.distributed, "get_data_parallel_group", lambda: "group")
    monkeypatch.setattr(word_memory.distributed, "all_reduce", lambda counts, group: counts.mul_(3))
    memory = word_memory.WordMemory(4, size=2)
    memory.add(torch.tensor([1, 1, 2]), 0)
    memory.add(torch.tensor([3]), 1)
    assert memory.total.tolist() == [0, 6, 3, 0]


def test_counts_of_another_dictionary_are_ignored():
    memory, other = word_memory.WordMemory(10, size=2), word_memory.WordMemory(11, size=2)
    for update in range(3):
        memory.add(torch.tensor([update, 7]), update)
    other.load_state_dict(memory.state_dict())
    assert len(other) == 0
    resumed = word_memory.WordMemory(10, size=2)
    resumed.load_state_dict(memory.state_dict())
    for one in (memory, resumed):
        one.add(torch.tensor([4]), 3)
    assert torch.equal(memory.total, resumed.total) and len(resumed) == 2


def test_a_repeated_batch_of_a_worker_without_one_is_not_counted():
    trainer = build_trainer(gradient_gating=ALPHA)
    memory = trainer.get_criterion().word_memory
    trainer.train_step([make_sample(trainer.task, seed=0)])
    counted = memory.state_dict()["pending"].clone()
    assert counted.sum() > 0
    trainer.train_step([None])  # as fairseq hands it to a worker that has run out of batches
    assert memory.total.equal(counted) and memory.state_dict()["pending"].sum() == 0
    trainer.train_step([make_sample(trainer.task, seed=0)])
    assert memory.state_dict()["pending"].equal(counted)


@pytest.mark.parametrize("done", [1, 3])
def test_a_training_resumes_with_its_counts(done, tmp_path):
    """After the first update, too, whose counts are those of an update under way."""
    through = build_trainer(gradient_gating=ALPHA)
    take_updates(through, done)
    save_in_epoch(through, tmp_path / "saved.pt", done)
    resumed = build_trainer(gradient_gating=ALPHA)
    resumed.load_checkpoint(str(tmp_path / "saved.pt"))
    for trainer in (through, resumed):
        take_updates(trainer, 2)
    first, second = (one.get_criterion().word_memory for one in (through, resumed))
    assert len(first) == len(second) == done + 1 and first.total.equal(second.total)
    assert same_models(through, resumed)


def test_validation_neither_counts_nor_gates(task):
    model, sample = build_model(task), sample_of(task, 5)
    criterion = filled(task, model.train(), criterion_of(task))
    before = criterion.word_memory.total.clone()
    loss = criterion(model.eval(), sample)[0]
    plain = build_criterion(task, "label_smoothed_cross_entropy", label_smoothing=0.1)
    assert torch.equal(loss, plain(model, sample)[0])
    assert torch.equal(criterion.word_memory.total, before)
