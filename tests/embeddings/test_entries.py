"""Kinds of tables whose options change the shapes of what they store are read as declared."""

import pytest
import torch
from torch import nn

from spectral_fairseq.checkpoints.averages import average_checkpoints
from spectral_fairseq.checkpoints.collapse import collapse_tables
from spectral_fairseq.embeddings import FactoredEmbedding
from spectral_fairseq.embeddings.entries import FACTORED_KINDS, dense_form
from spectral_fairseq.errors import CheckpointError
from tests.checkpoints.made import NAME, extracted, save

WORDS, DIM, COLUMNS, RANK = 90, 64, 24, 8


class Halves(FactoredEmbedding):
    """W = (L, R), of which L has some of the columns."""

    kind = "halves"
    entries = ("L", "R")

    def __init__(self, num_embeddings, embedding_dim, padding_idx, columns=1):
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        self.L = nn.Parameter(torch.zeros(num_embeddings, columns))
        self.R = nn.Parameter(torch.zeros(num_embeddings, embedding_dim - columns))

    @classmethod
    def stored_shape(cls, entries):
        return len(entries["L"]), entries["L"].size(1) + entries["R"].size(1)

    @classmethod
    def rebuilt(cls, entries, padding_idx):
        return cls(*cls.stored_shape(entries), padding_idx, entries["L"].size(1))

    @classmethod
    def dense_rows(cls, entries, rows, dtype):
        return torch.cat([entries["L"][rows], entries["R"][rows]], 1).to(dtype)

    def factor(self, weight):
        left = self.L.size(1)
        return {"L": weight[:, :left].clone(), "R": weight[:, left:].clone()}


class LowRank(FactoredEmbedding):
    """W = A B', which equals only matrices of a low rank."""

    kind = "low-rank"
    entries = ("A", "B")
    exact = False

    def __init__(self, num_embeddings, embedding_dim, padding_idx, rank=RANK):
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        self.A = nn.Parameter(torch.zeros(num_embeddings, rank))
        self.B = nn.Parameter(torch.zeros(embedding_dim, rank))

    @classmethod
    def stored_shape(cls, entries):
        return len(entries["A"]), len(entries["B"])

    @classmethod
    def rebuilt(cls, entries, padding_idx):
        return cls(*cls.stored_shape(entries), padding_idx, entries["A"].size(1))

    @classmethod
    def dense_rows(cls, entries, rows, dtype):
        return entries["A"][rows].to(dtype) @ entries["B"].to(dtype).t()

    def factor(self, weight):
        u, s, v = torch.linalg.svd(weight, full_matrices=False)
        rank = self.A.size(1)
        return {"A": u[:, :rank] * s[:rank], "B": v[:rank].t().contiguous()}


class Forgetful(Halves):
    """The same without its declaration, so that a table of the default options would be stored."""

    kind = "forgetful"
    entries = ("L", "R")

    @classmethod
    def rebuilt(cls, entries, padding_idx):
        return cls(*cls.stored_shape(entries), padding_idx)


OPTIONS = {Halves: {"columns": COLUMNS}, Forgetful: {"columns": COLUMNS}, LowRank: {"rank": RANK}}


@pytest.fixture
def known(monkeypatch):
    def register(kind):
        monkeypatch.setitem(FACTORED_KINDS, frozenset(kind.entries), kind)
        return kind

    return register


def stored(kind, seed):
    torch.manual_seed(seed)
    table = kind(WORDS, DIM, 1, **OPTIONS[kind])
    for parameter in table.parameters():
        nn.init.normal_(parameter)
    entries = {name: value.clone() for name, value in table.state_dict().items()}
    return entries, kind.dense_rows(entries, torch.arange(WORDS), torch.float64)


def named(entries):
    return {f"{NAME}.{name}": value for name, value in entries.items()}


@pytest.mark.parametrize("kind", [Halves, LowRank])
def test_the_whole_table_is_read_and_exported(kind, known):
    entries, expected = stored(known(kind), 0)
    table = extracted(named(entries), excluded=[])
    assert table.weight.shape == (WORDS, DIM) and table.kind == kind.kind
    torch.testing.assert_close(table.weight.double(), expected, rtol=1e-5, atol=1e-5)
    collapsed = collapse_tables(named(entries))[f"{NAME}.weight"]
    torch.testing.assert_close(collapsed.double(), expected, rtol=1e-5, atol=1e-5)


def averaged(kind, tmp_path):
    paths = [save(tmp_path / f"{seed}.pt", named(stored(kind, seed)[0])) for seed in range(2)]
    model = average_checkpoints(paths)["model"]
    return {name: model[f"{NAME}.{name}"] for name in kind.entries}


def test_an_exact_kind_is_averaged_with_its_options(known, tmp_path):
    found = averaged(known(Halves), tmp_path)
    assert found["L"].shape == (WORDS, COLUMNS)
    expected = (stored(Halves, 0)[1] + stored(Halves, 1)[1]) / 2
    torch.testing.assert_close(dense_form(Halves, found), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "kind, message",
    [(LowRank, "the average of .* to equal a low-rank table.*away"), (Forgetful, "rebuilt")],
)
def test_no_other_table_is_stored_as_the_average(kind, message, known, tmp_path):
    known(kind)
    with pytest.raises(CheckpointError, match=message):
        averaged(kind, tmp_path)


def test_a_plain_checkpoint_is_not_replaced_by_the_nearest_table():
    table = LowRank(WORDS, DIM, 1)
    torch.manual_seed(0)
    with pytest.raises(CheckpointError, match="table.weight of the checkpoint to equal a low-rank"):
        table.upgrade_state_dict_named({"table.weight": torch.randn(WORDS, DIM)}, "table")
    state = {"table.weight": torch.randn(WORDS, RANK) @ torch.randn(RANK, DIM)}
    weight = state["table.weight"]
    table.upgrade_state_dict_named(state, "table")
    found = LowRank.dense_rows(
        {name: state[f"table.{name}"] for name in "AB"}, torch.arange(WORDS), torch.float32
    )
    torch.testing.assert_close(found, weight, rtol=1e-4, atol=1e-4)


def test_a_table_is_not_made_of_a_matrix_that_it_only_comes_near():
    """It would be another matrix, in silence."""
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    with pytest.raises(CheckpointError, match="the matrix to equal a low-rank table.*away"):
        LowRank.from_dense(weight, 1)
    near = weight[:, :RANK] @ torch.randn(RANK, 64)
    made = LowRank.from_dense(near, 1)
    torch.testing.assert_close((made.A @ made.B.t()).detach(), near, rtol=1e-3, atol=1e-3)
