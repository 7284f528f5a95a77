"""A new kind of table or head needs a file of its own and a line in the list of its package.

Each is declared here as in a file of its own, and added to the list before the plugin is imported,
for which the test runs this file as a program. The assertions follow both to the flags, the model,
and the readers of checkpoints.
"""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spectral_fairseq import embeddings, heads
from spectral_fairseq.options import Option


class ScaledEmbedding(embeddings.FactoredEmbedding):
    """W = f M."""

    kind = "scaled"
    summary = "a matrix with one factor"
    entries = ("M", "f")
    options = (Option("scaled_start", 1.0, "f at the start of training", argument="start"),)

    def __init__(self, num_embeddings, embedding_dim, padding_idx, excluded_rows=(), start=1.0):
        super().__init__(num_embeddings, embedding_dim, padding_idx, excluded_rows)
        self.M = nn.Parameter(torch.randn(num_embeddings, embedding_dim))
        self.f = nn.Parameter(torch.tensor(start))

    @classmethod
    def build(cls, spec, **options):
        return cls(*spec[:4], **options)

    @classmethod
    def dense_rows(cls, entries, rows, dtype):
        return entries["M"][rows].to(dtype) * entries["f"].to(dtype)

    def factor(self, weight):
        return {"M": weight, "f": weight.new_ones(())}

    def forward(self, tokens):
        return F.embedding(tokens, self.M) * self.f

    def operands(self, features):
        return features * self.f, self.M

    def dense(self):
        return self.M * self.f


class TemperedHead(heads.SoftmaxHead):
    """Logits divided by a temperature."""

    kind = "tempered"
    summary = "a softmax with a temperature"
    options = (Option("temperature", 1.0, "what logits are divided by", argument="temperature"),)

    def __init__(self, table, *, bias=False, temperature=1.0):
        super().__init__(table, bias=bias)
        self.temperature = temperature

    def forward(self, features):
        return super().forward(features) / self.temperature


def main():
    embeddings.TABLES += (ScaledEmbedding,)
    heads.HEADS += (TemperedHead,)
    import spectral_fairseq.plugin  # noqa: F401  (registers with fairseq)
    from spectral_fairseq.checkpoints.collapse import collapse_tables
    from spectral_fairseq.embeddings.entries import stored_form
    from spectral_fairseq.errors import CheckpointError
    from spectral_fairseq.formats.stored import Stored
    from spectral_fairseq.formats.which_table import choose
    from tests.checkpoints.made import extracted
    from tests.plugin.conftest import SIZES, build_model, make_sample, words

    dictionary = words()
    task = type("Task", (), {"source_dictionary": dictionary, "target_dictionary": dictionary})
    flags = {"embedding_type": "scaled", "scaled_start": 3.0, "output_head": "tempered"}
    model = build_model(task, **flags, temperature=2.0).eval()
    table = model.decoder.embed_tokens
    assert isinstance(table, ScaledEmbedding) and table.f == 3
    assert table.embedding_dim == SIZES["decoder_embed_dim"]

    features, _ = model(**make_sample(task)["net_input"], features_only=True)
    expected = features @ table.weight.t() / 2
    logits, _ = model(**make_sample(task)["net_input"])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)

    stored = model.state_dict()
    found = extracted(stored, excluded=[])
    assert found.kind == "scaled"
    assert len(choose(Stored("x.pt", stored)).names) == 3
    torch.testing.assert_close(found.weight, table.weight.detach())
    collapsed = collapse_tables(stored)["decoder.embed_tokens.weight"]
    torch.testing.assert_close(collapsed, table.weight.detach())
    like = {"M": table.M, "f": table.f}
    made = stored_form(ScaledEmbedding, collapsed, like, "the table")
    torch.testing.assert_close(made["M"], collapsed.double())
    try:
        build_model(task).load_state_dict(stored)
    except CheckpointError as error:
        assert "--embedding-type scaled" in str(error)
    else:
        raise AssertionError("an SVD table took the checkpoint")


@pytest.mark.slow
def test_everything_follows_from_the_declaration():
    done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    main()
