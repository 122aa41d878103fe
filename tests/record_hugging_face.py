"""Records transformers' logits in ``tests/golden/hugging_face.json``, and those it has penalized.

``python -m tests.record_hugging_face``, where torch and transformers are installed.
"""

import json
import pathlib
import tempfile
from typing import Any

import numpy as np
import torch
import transformers

from tests.test_hugging_face import GOLDEN, KINDS, PENALTY, PROMPTS, random_checkpoint

recorded: dict[str, Any] = {"transformers": transformers.__version__}
for kind in KINDS:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        random_checkpoint.write_folder(kind, folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            rows = [model(torch.tensor([ids])).logits[0].numpy() for ids in PROMPTS]
        recorded[kind] = [np.round(logits, 6).tolist() for logits in rows]
penalty = transformers.RepetitionPenaltyLogitsProcessor(PENALTY)
recorded["repetition_penalty"] = [
    penalty(torch.tensor([ids]), torch.tensor([logits[-1]]))[0].tolist()
    for ids, logits in zip(PROMPTS, recorded["llama"], strict=True)
]
GOLDEN.write_text(json.dumps(recorded))
