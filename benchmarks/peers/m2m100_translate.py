"""Translates greedily with a checkpoint of M2M100: `m2m100_translate.py CHECKPOINT < IN > OUT`."""

import sys

import torch
from transformers import AutoTokenizer, M2M100ForConditionalGeneration

PAIRS = 64

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = M2M100ForConditionalGeneration.from_pretrained(sys.argv[1]).eval()
lines = sys.stdin.read().splitlines()
for first in range(0, len(lines), PAIRS):
    batch = tokenizer(lines[first : first + PAIRS], return_tensors="pt", padding=True)
    with torch.inference_mode():
        found = model.generate(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            num_beams=1,
            max_new_tokens=100,
        )
    for line in tokenizer.batch_decode(found, skip_special_tokens=True):
        print(line)
