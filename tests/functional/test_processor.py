import pytest

from spectral_fairseq.functional.processor import described_processor

MILAN = """processor	: 0
vendor_id	: AuthenticAMD
cpu family	: 25
model		: 1
model name	: AMD EPYC
flags		: fpu avx2

processor	: 1
vendor_id	: AuthenticAMD
"""
GENOA = MILAN.replace("\t: 1\nmodel name", "\t: 17\nmodel name").replace(
    "avx2", "avx2 avx512f avx512_bf16"
)
GRAVITON = "processor\t: 0\nFeatures\t: fp asimd bf16\n"


def test_two_generations_of_one_name_are_two_processors():
    """Virtual machines name both the same; a checkpoint or a record of one is not the other's."""
    older, newer = (described_processor(text.splitlines()) for text in (MILAN, GENOA))
    assert older.name == "AMD EPYC (family 25, model 1)"
    assert newer.name == "AMD EPYC (family 25, model 17)"
    assert older.vendor == newer.vendor == "AuthenticAMD"
    assert (older.has_bfloat16, newer.has_bfloat16) == (False, True)


@pytest.mark.parametrize("text", [GRAVITON, ""])
def test_what_is_not_described_is_left_out(text):
    found = described_processor(text.splitlines())
    assert "family" not in found.name and not found.vendor
    assert found.has_bfloat16 and not found.has_amx
