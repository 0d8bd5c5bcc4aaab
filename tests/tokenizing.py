"""A tokenizer for tests, trained on the spot."""

import tokenizers


def byte_pair_tokenizer(
  texts: list[str], vocab_size: int
) -> tokenizers.Tokenizer:
  """Trains a byte-level BPE tokenizer, which gives any text back."""
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocab_size,
    show_progress=False,
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
  )
  tokenizer.train_from_iterator(texts, trainer)
  return tokenizer
