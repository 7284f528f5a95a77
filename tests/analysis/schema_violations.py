"""Where a document departs from the published JSON schema, found by the package jsonschema."""

from jsonschema import Draft202012Validator

from spectral_fairseq.analysis.schema import DOCUMENT


def violations(document):
    """One line for each departure: its place in the document, and what is wrong there."""
    found = Draft202012Validator(DOCUMENT).iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in found]
