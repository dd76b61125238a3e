"""Retrieval datastore drafter."""

from mmspec.drafters.spec import DrafterSpec

SPEC = DrafterSpec(
    "datastore",
    "Datastore",
    "looks up the last tokens in an index of texts on disk (REST, arXiv 2311.08252)",
    "mmspec.drafters.datastore.drafter:Datastore",
    argument="STORE",
    chains=False,
)
