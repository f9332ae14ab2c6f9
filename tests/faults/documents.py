"""Faults of what is read: Megatron's datasets over files."""

from __future__ import annotations

from faults.baselines import baseline_fault
from faults.cases import DOCUMENTS, DOCUMENTS_RESUMED
from faults.kinds import Switch, edit
from faults.library import CORE, library_fault

DATASET = f"{CORE}/datasets/gpt_dataset.py"

DATASETS = (
    baseline_fault(
        "documents-not-shuffled",
        "documents are read in the order of their file",
        edit(DATASET, "        numpy_random_state.shuffle(document_index)\n", ""),
        DOCUMENTS,
        "step 1 read other samples than the planned ones",
        check="samples",
    ),
    baseline_fault(
        "sample-within-a-document-begins-late",
        "a sample that lies within one document begins a token late",
        edit(
            DATASET,
            "                    offset=int(doc_index_beg_offset),\n",
            "                    offset=int(doc_index_beg_offset) + 1,\n",
        ),
        DOCUMENTS,
        "step 1 read other samples than the planned ones",
        check="samples",
    ),
    library_fault(
        "documents-read-again-after-resuming",
        "a resumed training begins with the first sample again",
        Switch(name="documents-read-again-after-resuming"),
        DOCUMENTS_RESUMED,
        "observed",
        text="samples",
    ),
)
