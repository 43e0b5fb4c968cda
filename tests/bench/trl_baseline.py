"""The model of the comparison with TRL: a random Qwen3 with a vocabulary of 64.

All tokens are about equally likely, and one of them ends the completion. So completions end by chance, after 64 tokens
on average, with a long tail as in real runs.
"""

from pathlib import Path

VOCABULARY = 64
EOS = 1


def save_baseline_model(folder: Path, *, hidden: int = 256, layers: int = 6, seed: int = 0) -> Path:
    """Save a Hugging Face directory whose tokenizer has the words `w2` … `w63`."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers

    from app.model.hf_import import transformers

    vocabulary = {"<pad>": 0, "<eos>": EOS, **{f"w{index}": index for index in range(2, VOCABULARY)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers().PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    config = transformers().Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=EOS,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformers().Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
