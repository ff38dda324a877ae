"""Trains M2M100 from scratch: `m2m100.py ARGUMENTS.yaml DATA`, the folder of the segmented text."""

import sys
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import (
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    M2M100Config,
    M2M100ForConditionalGeneration,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)
from transformers.models.m2m_100.modeling_m2m_100 import shift_tokens_right


class Collator(DataCollatorForSeq2Seq):
    """Batches for Trainer's label smoothing, under which M2M100 gets no labels."""

    def __call__(self, features, return_tensors=None):
        """Adds what the decoder reads."""
        batch = super().__call__(features, return_tensors)
        batch["decoder_input_ids"] = shift_tokens_right(batch["labels"], 1, 2)
        return batch


(arguments,) = HfArgumentParser(Seq2SeqTrainingArguments).parse_yaml_file(sys.argv[1])
set_seed(arguments.seed)
data = Path(sys.argv[2])
words = ["<s>", "<pad>", "</s>", "<unk>", *(data / "vocab.txt").read_text("utf-8").splitlines()]
backend = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
backend.pre_tokenizer = WhitespaceSplit()
backend.post_processor = TemplateProcessing("$0 </s>", special_tokens=[("</s>", 2)])
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=backend,
    bos_token="<s>",
    pad_token="<pad>",
    eos_token="</s>",
    unk_token="<unk>",
)
sources, targets = (
    (data / f"train.{side}").read_text("utf-8").splitlines() for side in ("en", "de")
)
pairs = {"input_ids": tokenizer(sources).input_ids, "labels": tokenizer(targets).input_ids}
config = M2M100Config(
    vocab_size=len(words),
    d_model=128,
    encoder_layers=4,
    decoder_layers=4,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=256,
    decoder_ffn_dim=256,
    dropout=0.3,
    attention_dropout=0.0,
    activation_dropout=0.0,
    encoder_layerdrop=0.0,
    decoder_layerdrop=0.0,
)
trainer = Seq2SeqTrainer(
    M2M100ForConditionalGeneration(config),
    arguments,
    data_collator=Collator(tokenizer),
    train_dataset=Dataset.from_dict(pairs),
    processing_class=tokenizer,
)
trainer.train()
