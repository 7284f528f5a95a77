"""The task: states of its own for training and validation, exact counts, resuming, errors."""

import logging
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.optim.fairseq_optimizer import FairseqOptimizer
from torch import nn

from spectral_fairseq.checkpoints.reading import torch_load
from spectral_fairseq.errors import (
    ConfigurationError,
    DataError,
    MissingDataError,
    UnsupportedError,
)
from spectral_fairseq.plugin.corpus import Corpus
from spectral_fairseq.plugin.task import (
    StatefulLanguageModelingConfig,
    StatefulLanguageModelingTask,
    scaled_rate,
    update_freq_in,
)
from spectral_fairseq.plugin.trained_weights import trained_weights
from tests.plugin import conftest
from tests.plugin.conftest import build_criterion, words
from tests.plugin.trainers import PRECISIONS, build_trainer

LOGGER = "spectral_fairseq.plugin.task"


def sentences(tokens, seed=3):
    generator = torch.Generator().manual_seed(seed)
    corpus = torch.randint(4, 49, (tokens,), generator=generator)
    corpus[6::7] = 2
    return list(corpus.split(7))


def build_task(**options):
    options = {
        "data": "unused",
        "tokens_per_sample": 5,
        "variable_bptt": False,
        "update_freq": [1],
        "dataset_impl": None,
        **options,
    }
    task = StatefulLanguageModelingTask(Namespace(**options), words())
    task.datasets = {
        "train": Corpus(sentences(125), task.dictionary.eos()),
        "valid": Corpus(sentences(61, seed=4), task.dictionary.eos()),
        "valid1": Corpus(sentences(40, seed=5), task.dictionary.eos()),
    }
    return task


def build_model(task):
    sizes = {"decoder_embed_dim": 6, "decoder_hidden_size": 6, "decoder_layers": 1}
    model = conftest.build_model(task, "awd_lstm_ptb", **sizes).double()
    # fairseq's is in single precision.
    model.get_normalized_probs = lambda output, **_: torch.log_softmax(output[0], dim=-1)
    return model


def batches(task, split="train", size=3, epoch=1, **more):
    dataset = task.dataset(split)
    return task.get_batch_iterator(dataset, max_sentences=size, epoch=epoch, seed=1, **more)


def training_batches(task, **more):
    with task.for_training():
        return batches(task, **more)


class Backward:
    def backward(self, loss):
        loss.backward()


def train(task, model, samples):
    criterion = build_criterion(task, "cross_entropy")
    return [
        float(task.train_step(sample, model, criterion, Backward(), 0)[0].detach())
        for sample in samples
    ]


def validate(task, model, split="valid", size=3):
    """Negative log-likelihood and number of tokens, both summed."""
    criterion = build_criterion(task, "cross_entropy")
    itr = batches(task, split, size).next_epoch_itr()
    losses, counts, logs = zip(*(task.valid_step(sample, model, criterion) for sample in itr))
    assert sum(log["ntokens"] for log in logs) == sum(counts)
    return float(sum(losses)), sum(counts)


@torch.no_grad()
def one_pass(task, model, split, size):
    """The same streams without segments and batches."""
    tokens = task.dataset(split).tokens.long()
    bounds = [stream * (len(tokens) - 1) // size for stream in range(size + 1)]
    total = 0.0
    for begin, end in zip(bounds, bounds[1:]):
        scores = model(tokens[begin:end][None])[0][0]
        total += float(nn.functional.cross_entropy(scores, tokens[begin + 1 : end + 1].clone())) * (
            end - begin
        )
    return total


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("length", [1, 4, 5, 100])
def test_perplexity_is_that_of_one_pass(length, size):
    task = build_task(tokens_per_sample=length)
    model = build_model(task).eval()
    loss, count = validate(task, model, size=size)
    assert count == 61
    assert loss == pytest.approx(one_pass(task, model, "valid", size), rel=1e-12)


def test_validation_starts_afresh_and_leaves_training_alone():
    task = build_task(update_freq=[2])
    model = build_model(task)
    itr = training_batches(task).next_epoch_itr()
    samples = list(itr)
    task.begin_epoch(1, model)
    undisturbed = train(task, model, samples)
    task.begin_epoch(1, model)
    disturbed = []
    found = []
    for update in range(0, len(samples), 2):
        disturbed += train(task, model, samples[update : update + 2])
        task.begin_valid_epoch(1, model)
        found.append((validate(task, model), validate(task, model, "valid1", 4)))
    assert disturbed == undisturbed
    assert set(found) == {found[0]}
    assert found[0][1][0] == pytest.approx(one_pass(task, model, "valid1", 4), rel=1e-12)


def test_slots_have_states_of_their_own():
    """Two slots of three streams read what six streams read at once, at any segment."""
    two, one = build_task(update_freq=[2]), build_task()
    model = build_model(two)
    pairs = train(two, model, training_batches(two).next_epoch_itr())
    whole = train(one, model, training_batches(one, size=6).next_epoch_itr())
    assert len(whole) == 4
    assert [a + b for a, b in zip(pairs[::2], pairs[1::2])] == pytest.approx(whole, rel=1e-12)


def test_update_freq_by_epoch():
    task = build_task(update_freq=[1, 2, 4])
    counts = [training_batches(task, epoch=epoch).streams.slots for epoch in (1, 2, 3, 4)]
    assert counts == [1, 2, 4, 4]


def test_a_batch_that_is_fed_again_starts_where_it_started():
    task = build_task()
    model = build_model(task)
    samples = list(training_batches(task).next_epoch_itr())
    once = train(task, model, samples)
    assert train(task, model, [s for s in samples for _ in range(2)])[::2] == once


def test_stand_in_batches_touch_no_state():
    task = build_task()
    model, criterion = build_model(task), build_criterion(task, "cross_entropy")
    samples = list(training_batches(task).next_epoch_itr())
    expected = train(task, model, samples)
    found = train(task, model, samples[:2])
    task.train_step(samples[4], model, criterion, Backward(), 0, ignore_grad=True)
    assert found + train(task, model, samples[2:]) == expected


def test_the_split_does_not_say_that_it_is_for_training():
    """Validating on the training split counts all of it, whatever training leaves out."""
    task = build_task(update_freq=[2], variable_bptt=True, tokens_per_sample=10)
    training_batches(task, size=8)
    assert validate(task, build_model(task), "train", 8)[1] == 125


def test_lengths_follow_seed_and_epoch():
    task = build_task(variable_bptt=True, tokens_per_sample=10)

    def lengths(**more):
        return training_batches(task, size=1, **more).streams.lengths

    assert lengths() == lengths(num_shards=1, shard_id=0)
    assert lengths(epoch=2) == lengths(epoch=2) != lengths()
    assert batches(task, size=1).streams.lengths == [10] * 12 + [5]
    shards = [training_batches(task, num_shards=2, shard_id=shard) for shard in (0, 1)]
    assert shards[0].streams.lengths == shards[1].streams.lengths


class Optimizer(FairseqOptimizer):
    def __init__(self, broken=False):
        self.used, self.broken = [], broken
        groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (2.0, 3.0)]
        self._optimizer = torch.optim.SGD(groups, lr=1.0)

    def step(self, **_):
        self.used.append([group["lr"] for group in self.param_groups])
        if self.broken:
            raise OverflowError

    def backward(self, loss):
        loss.backward()


@pytest.mark.parametrize("broken", [False, True])
def test_learning_rate_follows_the_length(broken):
    task = build_task(variable_bptt=True, tokens_per_sample=10)
    model, criterion = build_model(task), build_criterion(task, "cross_entropy")
    optimizer = Optimizer(broken)
    iterator = training_batches(task)
    for sample in iterator.next_epoch_itr():
        task.train_step(sample, model, criterion, optimizer, 0)
        try:
            task.optimizer_step(optimizer, model, 0)
        except OverflowError:
            assert broken
        assert [group["lr"] for group in optimizer.param_groups] == [2.0, 3.0]
    lengths = iterator.streams.lengths
    assert len(set(lengths)) > 1
    assert optimizer.used == [[2.0 * (n / 10), 3.0 * (n / 10)] for n in lengths]


@pytest.mark.parametrize("precision", ["fp16", "memory-efficient fp16"])
def test_learning_rate_of_half_precision_optimizers(precision):
    overrides = (*PRECISIONS[precision], "optimizer.momentum=0.0")
    trainer = build_trainer(*overrides, optimizer="nag", begin=False)
    optimizer, weight = trainer.optimizer, trainer.get_model().decoder.embed_tokens.weight
    trained = trained_weights(optimizer, weight)
    with torch.no_grad():
        trained.zero_()
    optimizer.set_lr(0.5)
    optimizer.zero_grad()  # sets the factor that undoes the loss scale
    optimizer.backward(weight.sum())
    with scaled_rate(optimizer, 0.5):
        assert optimizer.get_lr() == 0.25
        optimizer.step()
    assert optimizer.get_lr() == 0.5
    assert trained.eq(-0.25).all()


def interrupted(folder, updates, epoch=2, size=3, **options):
    """Losses of an epoch, and the state after so many updates of it, through a file."""
    task = build_task(**options)
    model = build_model(task)
    iterator = training_batches(task, epoch=epoch, size=size)
    itr = iterator.next_epoch_itr()
    task.begin_epoch(epoch, model)
    slots = iterator.streams.slots
    losses = train(task, model, [next(itr) for _ in range(updates * slots)])
    iterator.gathered, iterator.precision = iterator.carries.states(slots), "torch.float64"
    torch.save(iterator.state_dict(), folder / "state.pt")
    return losses + train(task, model, itr), torch_load(folder / "state.pt")


def resumed(state, size=3, **options):
    task = build_task(**options)
    model = build_model(task)
    iterator = training_batches(task, epoch=state["epoch"], size=size)
    iterator.load_state_dict(state)
    itr = iterator.next_epoch_itr()
    task.begin_epoch(iterator.epoch, model)
    return train(task, model, itr), iterator


@pytest.mark.parametrize("variable", [False, True])
def test_resumed_epoch_equals_the_uninterrupted_one(variable, tmp_path, caplog):
    options = {"update_freq": [2], "variable_bptt": variable, "tokens_per_sample": 10}
    through, state = interrupted(tmp_path, 1, size=2, **options)
    losses, _ = resumed(state, size=2, **options)
    assert 0 < len(losses) == len(through) - 2
    assert losses == through[2:]
    assert "afresh" not in caplog.text


def test_states_follow_their_streams_to_other_workers(tmp_path):
    """Saved by one worker with two slots, continued by two workers."""
    through, state = interrupted(tmp_path, 2, update_freq=[2])
    for worker in (0, 1):
        task = build_task()
        iterator = training_batches(task, epoch=2, num_shards=2, shard_id=worker)
        iterator.load_state_dict(state)
        assert iterator.iterations_in_epoch == 2
        losses = train(task, build_model(task), iterator.next_epoch_itr())
        assert losses == through[4 + worker :: 2]


def test_a_worker_that_saves_nothing_gives_its_states_to_the_first(monkeypatch):
    """The first would wait for them for ever."""
    task = build_task()
    iterator = training_batches(task, num_shards=2, shard_id=1)
    next(iterator.next_epoch_itr())
    given = []

    def gather(by_worker, states, group):
        given.append(states)
        by_worker[:] = [states] * len(by_worker)

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    trainer = SimpleNamespace(
        data_parallel_rank=1,
        data_parallel_process_group=None,
        get_model=lambda: build_model(task),
    )
    cfg = SimpleNamespace(no_save=True, maximize_best_checkpoint_metric=False)
    checkpoint_utils.save_checkpoint(cfg, trainer, iterator, None)
    assert given == [iterator.carries.states(iterator.streams.slots)]


@pytest.mark.parametrize("changed, key", [
    ({"size": 2}, "batch_size was 3, is 2"),
    ({"update_freq": [1]}, "groups was 2, is 1"),
    ({"update_freq": [4]}, "groups was 2, is 4"),
    ({"tokens_per_sample": 7}, "start was 10, is 14"),
    ({"variable_bptt": True, "tokens_per_sample": 10}, "start was 10, is"),
])  # fmt: skip
def test_other_streams_start_afresh_at_the_same_share(changed, key, tmp_path, caplog):
    _, state = interrupted(tmp_path, 2, update_freq=[2])
    with caplog.at_level(logging.WARNING):
        losses, iterator = resumed(state, **{"update_freq": [2], **changed})
    assert "the streams start afresh" in caplog.text and key in caplog.text
    slots, starts = iterator.streams.slots, iterator.streams.starts
    share = 10 / 20  # two of four segments
    assert len(losses) == slots * max(1, sum(s >= share * iterator.streams.length for s in starts))
    task = build_task(**{"update_freq": [2], **{k: v for k, v in changed.items() if k != "size"}})
    model = build_model(task)
    fresh = training_batches(task, epoch=2, size=changed.get("size", 3))
    samples = list(fresh.next_epoch_itr())[-len(losses) :]
    assert losses[:slots] == train(task, model, samples[:slots])


def test_positions_without_states(tmp_path, caplog):
    through, state = interrupted(tmp_path, 2)
    with caplog.at_level(logging.WARNING):
        losses, _ = resumed({**state, "streams": {**state["streams"], "states": None}})
        assert "no carried states" in caplog.text and len(losses) == len(through) - 2
        del state["streams"]
        losses, iterator = resumed(state)
    assert "another task" in caplog.text and losses == through and iterator.epoch == 2


def test_another_precision_starts_afresh(tmp_path, caplog):
    _, state = interrupted(tmp_path, 2)
    task = build_task()
    iterator = training_batches(task, epoch=2)
    iterator.load_state_dict(state)
    iterator.next_epoch_itr()
    with caplog.at_level(logging.WARNING, LOGGER):
        task.begin_epoch(2, build_model(task).float())
    assert "saved in torch.float64" in caplog.text
    assert iterator.carries.states(1) == [None]


def test_what_training_leaves_out_is_said_once(caplog):
    task = build_task()
    with caplog.at_level(logging.INFO, LOGGER):
        for epoch in (1, 2, 3):
            training_batches(task, epoch=epoch)
    assert caplog.text.count("2 of 125 tokens are left out") == 1


def test_fewer_streams_where_the_corpus_is_short(caplog):
    task = build_task()
    model = build_model(task)
    with caplog.at_level(logging.INFO, LOGGER):
        loss, count = validate(task, model, size=100)
    assert count == 61 and "in 61 streams instead of 100" in caplog.text
    with pytest.raises(DataError, match="200 tokens in the corpus, one for each stream"):
        training_batches(task, size=200)


@pytest.mark.parametrize("options, message", [
    ({"split": "valid", "max_sentences": 3, "max_tokens": 14},
     "--max-tokens-valid to be a whole number >= 15; .*--batch-size-valid"),
    ({"max_sentences": None, "max_tokens": 100}, "found 0.* --max-tokens does not"),
    ({"max_sentences": None}, "Add --batch-size"),
    ({"max_sentences": -2}, ">= 1; found -2"),
    ({"max_sentences": 3, "max_tokens": 14}, "-valid to be a whole number >= 15; found 14"),
    ({"max_sentences": 3, "max_positions": 4}, "--tokens-per-sample to be a whole number <= 4"),
    ({"max_sentences": 3, "max_positions": (8, 4)}, "-sample to be a whole number <= 4"),
    ({"max_sentences": 3, "max_positions": (None, 4)}, "-sample to be a whole number <= 4"),
])  # fmt: skip
def test_batches_that_cannot_be_made(options, message):
    task = build_task()
    options = dict(options)
    dataset = task.dataset(options.pop("split", "train"))
    with pytest.raises(ConfigurationError, match=message):
        task.get_batch_iterator(dataset, **options)


def test_no_micro_batch_in_an_update_is_refused():
    with pytest.raises(
        ConfigurationError, match="--update-freq to be a whole number >= 1; found 0"
    ):
        update_freq_in(SimpleNamespace(update_freq=[2, 0]), 2)


def setup_options(**options):
    fields = StatefulLanguageModelingConfig.__dataclass_fields__
    defaults = {name: field.default for name, field in fields.items()}
    return SimpleNamespace(**{**defaults, "data": "x", **options})


@pytest.mark.parametrize("options, message", [
    ({"tokens_per_sample": 0}, "--tokens-per-sample to be a whole number >= 1;"),
    ({"tokens_per_sample": 9, "variable_bptt": True}, "-bptt to be a whole number >= 10"),
    ({"data": None}, "a data folder"),
    ({"add_bos_token": True}, "--add-bos-token"),
])  # fmt: skip
def test_options_that_cannot_be_trained(options, message):
    with pytest.raises((ConfigurationError, UnsupportedError), match=message):
        StatefulLanguageModelingTask.setup_task(setup_options(**options))


def test_missing_folder_and_split(tiny_lm_data):
    task = build_task(data=str(tiny_lm_data))
    with pytest.raises(MissingDataError, match="the split 'dev' in the data folder"):
        task.load_dataset("dev")
    task.args.data = f"{tiny_lm_data}:{tiny_lm_data / 'none'}"
    task.load_dataset("valid")  # only the first folder is asked for it
    with task.for_training(), pytest.raises(MissingDataError, match="data folder .*none"):
        task.load_dataset("train", epoch=1)
    with pytest.raises(MissingDataError, match="no such folder"):
        StatefulLanguageModelingTask.setup_task(setup_options(data="/none"))


def test_folders_take_turns(tiny_lm_data):
    task = build_task(data=f"{tiny_lm_data}:{tiny_lm_data}")
    assert task.has_sharded_data("train")
    text = (tiny_lm_data / "train.txt").read_text().replace("\n", " </s> ").split()
    task.dictionary = task.dictionary.load(str(tiny_lm_data / "dict.txt"))
    for epoch in (1, 2, 3):
        task.load_dataset("train", epoch=epoch, combine=True)
        corpus = task.dataset("train")
        assert [task.dictionary[int(token)] for token in corpus.tokens] == ["</s>", *text]
        assert len(corpus) == len(text) and int(corpus[0]) == int(corpus.tokens[1])


def test_a_model_without_state_is_refused(tiny_lm_data):
    """With the options that fairseq makes of a command line, all of which must resolve."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from omegaconf import OmegaConf

    parser = options.get_training_parser()
    flags = ["--task", "stateful_language_modeling", "--arch", "transformer_lm"]
    args = options.parse_args_and_arch(parser, [str(tiny_lm_data), *flags, "--update-freq", "2,4"])
    config = convert_namespace_to_omegaconf(args)
    OmegaConf.to_container(config, resolve=True)
    task = StatefulLanguageModelingTask.setup_task(config.task)
    assert [update_freq_in(config.task, epoch) for epoch in (1, 2, 3)] == [2, 4, 4]
    with pytest.raises(ConfigurationError, match="--arch transformer_lm.*awd_lstm_wt2"):
        task.build_model(config.model)


def test_fairseqs_scorer_is_refused():
    task = build_task()
    with pytest.raises(UnsupportedError, match="Leave --task out"):
        task.eval_lm_dataloader(task.dataset("valid"), batch_size=1)


def test_lines_to_continue_are_batched_by_fairseq():
    """Those of fairseq-interactive; fairseq-generate, which would cut a split, is refused."""
    task = build_task()
    lines = [torch.tensor([5, 6, 7, 2]), torch.tensor([8, 2])]
    dataset = task.build_dataset_for_inference(lines, [4, 2])
    iterator = task.get_batch_iterator(dataset, max_sentences=2, max_positions=100)
    (batch,) = iterator.next_epoch_itr(shuffle=False)
    assert batch["net_input"]["src_tokens"].tolist() == [[2, 5, 6, 7], [2, 8, 1, 1]]
    assert "segment" not in batch
    piece = next(batches(task, "valid").next_epoch_itr())
    with pytest.raises(UnsupportedError, match="--sample-break-mode eos"):
        task.inference_step(None, [], piece)
