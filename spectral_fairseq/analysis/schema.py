"""JSON Schema (draft 2020-12) of the document of results: what programs may rely on.

A change that breaks programs changes the number in ``results.SCHEMA``.
"""

from __future__ import annotations

from typing import Any, Dict

from spectral_fairseq.analysis.catalogue import ALL
from spectral_fairseq.analysis.options import Options
from spectral_fairseq.analysis.results import ORIGINS, SCHEMA
from spectral_fairseq.embeddings import TABLES
from spectral_fairseq.options import json_properties


def _of(kind: Any, description: str, **more: Any) -> Dict[str, Any]:
    return {"type": kind, "description": description, **more}


def _record(description: str, properties: Dict[str, Any], optional: bool = False) -> Dict[str, Any]:
    return {
        "type": ["object", "null"] if optional else "object",
        "description": description,
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _numbers(description: str) -> Dict[str, Any]:
    return _of("array", description, items={"type": "number"})


def _map(description: str, values: Any) -> Dict[str, Any]:
    return _of("object", description, additionalProperties=values)


_TEXT_OR_NULL = ["string", "null"]
_NUMBER_OR_NULL = ["number", "null"]
_INTEGER_OR_NULL = ["integer", "null"]


def _cosines(description: str) -> Dict[str, Any]:
    return _record(
        description,
        {
            "edges": _numbers("of the bins"),
            "counts": _of("array", "pairs in each bin", items={"type": "integer"}),
            "words": _of("integer", "words sampled"),
        },
    )


_CHECKPOINT = _record(
    "one checkpoint's table",
    {
        "path": _of(_TEXT_OR_NULL, "the file or folder, as given; null for a model in memory"),
        "label": _of("string", "its name in tables and pictures"),
        "sha256": _of(
            "string",
            "hash of the file that holds the table, or of a table in memory",
            pattern="^[0-9a-f]{64}$",
        ),
        "signature": _of("string", "options, seed, versions and hashes behind the numbers"),
        "origin": _of(
            "string",
            "fairseq: a checkpoint of fairseq; model: of another framework; vectors: a table alone",
            enum=list(ORIGINS),
        ),
        "arch": _of(_TEXT_OR_NULL, "the framework's name of the architecture"),
        "progress": _record(
            "how far training had come",
            {
                "epoch": _of(_INTEGER_OR_NULL, "epoch of the training iterator"),
                "updates": _of(_INTEGER_OR_NULL, "updates of the optimiser"),
            },
        ),
        "table": _record(
            "what was measured",
            {
                "name": _of("string", "module that holds the table"),
                "names": _of("array", "all modules that share it", items={"type": "string"}),
                "choice": _of("string", "what it is, and which other tables there are"),
                "is_output": _of("boolean", "whether the softmax is known to use it"),
                "kind": _of("string", "how it is stored", enum=[table.kind for table in TABLES]),
                "rows": _of("integer", "rows stored"),
                "words": _of("integer", "rows measured: padding and made-up words left out"),
                "dimensions": _of("integer", "d"),
                "dtype": _of("string", "type of the stored numbers"),
            },
        ),
        "dictionary": _record(
            "words and counts of the rows",
            {
                "path": _of(_TEXT_OR_NULL, "file; null for none"),
                "sha256": _of(_TEXT_OR_NULL, "its hash"),
                "remark": _of("string", "where it came from, or why there is none"),
                "counts": _record(
                    "counts given beside the dictionary",
                    {
                        "path": _of(_TEXT_OR_NULL, "file; null for none, or for counts in memory"),
                        "sha256": _of(_TEXT_OR_NULL, "its hash"),
                    },
                ),
            },
        ),
        "measures": {
            **_map("each measure; null or missing where it does not apply", False),
            "properties": {m.key: _of(_NUMBER_OR_NULL, m.meaning) for m in ALL},
        },
        "random": _map(
            "what a random table of the same shape and row length would measure, where known",
            {"type": "number"},
        ),
        "random_singular_values": _numbers("its expected singular values, largest first"),
        "centred": _record(
            "the table minus its mean row",
            {
                "singular_values": _numbers("largest first"),
                "cosines": _cosines("histogram of the cosines between the sampled words"),
            },
        ),
        "singular_values": _numbers("true singular values of the table, largest first"),
        "prior": _of(
            ["array", "null"],
            "singular values of the prior it was trained with",
            items={"type": "number"},
        ),
        "fits": _map(
            "exponential and polynomial decay fitted to the singular values",
            _map("parameters", {"type": "number"}),
        ),
        "isotropy_runs": _record(
            "I1 and I2 of each sample; null where all words were taken",
            {
                "words": _of("integer", "words of a sample"),
                "values": _map("measure -> one value a sample", _numbers("values")),
            },
            optional=True,
        ),
        "cosines": _cosines("histogram of the cosines between the sampled words"),
        "norms": _record(
            "row norms in bins of frequency rank",
            {
                "rank": _numbers("geometric middle of each bin"),
                "mean": _numbers("mean norm"),
                "p10": _numbers("10th percentile"),
                "p90": _numbers("90th percentile"),
            },
        ),
        "norm_histogram": _record(
            "histogram of the row norms",
            {
                "edges": _numbers("of the bins"),
                "counts": _of("array", "words in each bin", items={"type": "integer"}),
            },
        ),
        "counts": _record(
            "some words, evenly spaced in the logarithm of their rank; null without counts",
            {
                "rank": _of("array", "frequency rank, from 1 on", items={"type": "integer"}),
                "count": _of("array", "count in the dictionary", items={"type": "integer"}),
                "log_count": _numbers("smoothed log count"),
                "norm": _numbers("row norm"),
            },
            optional=True,
        ),
        "untrained": _of(
            "array",
            "the first rows that look never trained",
            items=_record(
                "a row",
                {
                    "row": _of("integer", "in the checkpoint"),
                    "word": _of(_TEXT_OR_NULL, "spelling; null without a dictionary"),
                },
            ),
        ),
        "dominant_row": _record(
            "the longest row, if it makes up half or more of the first direction of the centred "
            "table; null if it does not",
            {
                "row": _of("integer", "in the checkpoint"),
                "word": _of(_TEXT_OR_NULL, "spelling; null without a dictionary"),
                "share": _of("number", "of the squared length of the table"),
            },
            optional=True,
        ),
        "counterpart": _of(
            _TEXT_OR_NULL, "table that input_output_* compare with; null if it is shared"
        ),
        "frequency_order": _of(
            "string",
            "what the ranks come from: counts, or the order of the rows",
            enum=["counts", "rows"],
        ),
        "neighbours": _map(
            "word -> its nearest neighbours by cosine",
            _of(
                "array",
                "nearest first",
                items=_record(
                    "a neighbour",
                    {"word": _of("string", "spelling"), "cosine": _of("number", "cosine")},
                ),
            ),
        ),
        "drift": _record(
            "what drift_* compare with; null in the first checkpoint",
            {
                "from": _of("string", "label of the first checkpoint"),
                "words": _of("integer", "words that both tables have"),
            },
            optional=True,
        ),
        "outputs": _record(
            "what the model predicts on data; null where none were given",
            {
                "data": _of("string", "folder of binarised data"),
                "subset": _of("string", "its subset"),
                "tokens": _of("integer", "m: contexts, the first ones of the subset"),
                "words": _of("integer", "n: words of the dictionary, all rows"),
                "threshold": _of("number", "of the rank: sigma/sigma_1 above it counts"),
                "points": _numbers("x, between 0 and 1"),
                "cumulative_share": _numbers("share of singular values <= x sigma_1"),
                "layers": _of(
                    "array",
                    "the decoder's hidden states: embeddings, layers, input of the output layer; "
                    "only the last one where the model keeps the others to itself",
                    items=_record(
                        "a layer",
                        {
                            "mean_cosine": _of("number", "over all pairs of states"),
                            "isoscore": _of("number", "of the states"),
                            "rms_norm": _of("number", "root mean square of the norms"),
                            "outlier_dimensions": _of(
                                "array", "largest first", items={"type": "integer"}
                            ),
                        },
                    ),
                ),
                "hull": _record(
                    "convex hull of a sample of the inputs of the output layer; null if unseen",
                    {
                        "states": _of("integer", "sampled"),
                        "dimensions": _of("integer", "d"),
                        "inside": _of(
                            ["boolean", "null"],
                            "whether it contains the origin; null beyond 512 dimensions",
                        ),
                        "random": _of(
                            "number", "probability that random states would contain the origin"
                        ),
                    },
                    optional=True,
                ),
            },
            optional=True,
        ),
        "nbest": _record(
            "n-best lists behind the BLEU measures; null where none were given",
            {
                "file": _of("string", "output of fairseq-generate"),
                "sentences": _of("integer", "sentences"),
                "hypotheses": _record(
                    "of a sentence",
                    {"least": _of("integer", "fewest"), "most": _of("integer", "most")},
                ),
                "references": _of("integer", "of a sentence, at most"),
                "signature": _of("string", "sacrebleu's, of the highest order"),
            },
            optional=True,
        ),
    },
)

DOCUMENT: Dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Measures of embedding tables",
    **_record(
        "what spectral-fairseq analyze and compare write",
        {
            "schema": _of("string", "version of this schema", const=SCHEMA),
            "command": _of("string", "which subcommand", enum=["analyze", "compare"]),
            "versions": _map("of the software; null where not installed", {"type": _TEXT_OR_NULL}),
            "threads": _of("integer", "threads that the numbers were computed with"),
            "options": _record("what decides the samples", json_properties(Options)),
            "checkpoints": _of("array", "in the order given", items=_CHECKPOINT, minItems=1),
            "methods": _of(
                "array",
                "mean and spread over the seeds of each method of --methods",
                items=_record(
                    "a method",
                    {
                        "name": _of("string", "as given"),
                        "labels": _of("array", "its checkpoints", items={"type": "string"}),
                        "measures": _map(
                            "measure that all of them have -> its distribution",
                            _record(
                                "over the checkpoints",
                                {
                                    "mean": _of("number", "mean"),
                                    "std": _of(
                                        _NUMBER_OR_NULL,
                                        "standard deviation, divided by n - 1; null for one",
                                    ),
                                },
                            ),
                        ),
                    },
                ),
            ),
        },
    ),
}
