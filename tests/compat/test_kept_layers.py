from __future__ import annotations

from typing import Any, Dict, List

import pytest

from tests.compat.fairseq_process import Failure, FairseqProcess


def prune(kept: Dict[str, Any], encoder: int, decoder: int) -> List[Any]:
    """Load weights of so many layers: the layers that a model gets, and what its settings say."""
    from fairseq.checkpoint_utils import prune_state_dict
    from omegaconf import OmegaConf

    state = {
        f"{side}.layers.{layer}.fc1.weight": f"{side[0]}{layer}"
        for side, number in (("encoder", encoder), ("decoder", decoder))
        for layer in range(number)
    }
    settings = OmegaConf.create({"_name": "any", "decoder_layers": 12, **kept})
    OmegaConf.set_struct(settings, True)
    found = prune_state_dict(state, settings)
    names = sorted(found)
    return [
        [found[name] for name in names],
        [name.split(".")[2] for name in names],
        {name: settings.get(name) for name in ("encoder_layers", "decoder_layers", *kept)},
    ]


BOTH = {"encoder_layers_to_keep": "0,2", "decoder_layers_to_keep": "3,1"}
CUT = {name: None for name in BOTH}


@pytest.mark.parametrize("kept, encoder, decoder, layers, settings", [
    (BOTH, 4, 4, ["d1", "d3", "e0", "e2"], {"encoder_layers": 2, "decoder_layers": 2, **CUT}),
    (BOTH, 2, 2, ["d0", "d1", "e0", "e1"], {"encoder_layers": 2, "decoder_layers": 2, **CUT}),
    (
        {"decoder_layers_to_keep": "1"}, 2, 3, ["d1", "e0", "e1"],
        {"encoder_layers": None, "decoder_layers": 1, "decoder_layers_to_keep": None},
    ),
    (  # as YAML reads it
        {"decoder_layers_to_keep": [0, 2]}, 0, 3, ["d0", "d2"],
        {"encoder_layers": None, "decoder_layers": 2, "decoder_layers_to_keep": None},
    ),
    (
        {"decoder_layers_to_keep": 1}, 0, 3, ["d1"],
        {"encoder_layers": None, "decoder_layers": 1, "decoder_layers_to_keep": None},
    ),
    (
        {"encoder_layers_to_keep": None}, 1, 1, ["d0", "e0"],
        {"encoder_layers": None, "decoder_layers": 12, "encoder_layers_to_keep": None},
    ),
])  # fmt: skip
def test_settings_say_what_is_kept(
    patched: FairseqProcess,
    kept: Dict[str, Any],
    encoder: int,
    decoder: int,
    layers: List[str],
    settings: Dict[str, Any],
) -> None:
    found, numbers, said = patched.call(prune, kept=kept, encoder=encoder, decoder=decoder)
    assert found == layers and said == settings
    expected = [str(index) for side in "de" for index, _ in enumerate(
        [layer for layer in layers if layer[0] == side]
    )]  # fmt: skip
    assert numbers == expected


@pytest.mark.parametrize("kept, match", [
    ("0,4", "which has 4; found layer 4"),
    ("0,0", "to be different numbers of layers from 0, such as 0,2; found '0,0'"),
    ("first", "found 'first'"),
    ("-1,2", "found '-1,2'"),
])  # fmt: skip
def test_layers_that_are_not_there(patched: FairseqProcess, kept: str, match: str) -> None:
    with pytest.raises(Failure, match=match):
        patched.call(prune, kept={"encoder_layers_to_keep": kept}, encoder=4, decoder=4)


def test_fairseq_still_forgets(bare: FairseqProcess) -> None:
    """The patch can go once this fails."""
    found, _, said = bare.call(prune, kept={"decoder_layers_to_keep": "1"}, encoder=2, decoder=3)
    assert found == ["d1"] and said["decoder_layers"] == 12
