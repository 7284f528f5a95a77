"""The example with transformers.Trainer, at sizes at which its figures mean nothing."""

import re
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "causal_lm_transformers" / "run.py"
if not SCRIPT.exists():
    pytest.skip("the examples are not beside these tests", allow_module_level=True)


@pytest.mark.slow
@pytest.mark.parametrize("own_text", [True, False])
def test_it_trains_measures_and_saves_plain_models(own_text, transformers, tmp_path, capsys):
    pytest.importorskip("accelerate")
    options = ["--steps", "2", "--words", "60", "--width", "16", "--layers", "1"]
    if own_text:
        text = tmp_path / "text.txt"
        lines = [f"the cat {i % 40} sat on the mat {i % 7}, and the dog ran.\n" for i in range(400)]
        text.write_text("".join(lines), "utf-8")
        options += ["--text", str(text)]
    else:
        options += ["--methods", "control"]
    main = runpy.run_path(str(SCRIPT))["main"]
    assert main([*options, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    (line,) = re.findall(r"^perplexity +(.+)$", printed, re.M)
    assert len(line.split()) == (3 if own_text else 1) and all(float(x) > 1 for x in line.split())
    assert re.search(r"^effective_rank_centred +[\d.]+", printed, re.M)
    (folder, *_) = (tmp_path / "out").glob("*/model")
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.architectures == ["GPT2LMHeadModel"]
