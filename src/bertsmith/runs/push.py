"""`bertsmith push`: upload a finished folder to the Hugging Face hub."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bertsmith.bundled import model_folder
from bertsmith.errors import InputError, first_line
from bertsmith.exporting import CARD_FILE
from bertsmith.runs.output import MARK
from bertsmith.runs.result import OneShotResult, count_of, print_plain

_NOT_PUSHED = [MARK, "checkpoints/**", "*.partial/**"]


@dataclass(frozen=True, kw_only=True)
class PushResult(OneShotResult):
    """Address and files of an uploaded folder."""

    repository: str
    address: str
    files: list[str]


def push(
    folder: str | Path,
    repository: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    license: str | None = None,
) -> PushResult:
    """Upload a finished folder to the Hugging Face hub, with its model card.

    Sign in once with `hf auth login`, or set HF_TOKEN. HF_ENDPOINT selects another hub.

    Parameters
    ----------
    folder
        Folder that `bertsmith export` wrote: for transformers (--to hf) or ONNX Runtime (--to onnx).
    repository
        Name on the hub, as USER/NAME; it is created if it does not exist.
    private
        Create the repository as a private one.
    revision
        Branch to upload to; the main branch by default.
    message
        Message of the commit.
    license
        Licence of the weights for the model card, such as apache-2.0. The card must state one.
    """
    path = model_folder(folder)
    files = _check_folder(path)
    card = _licensed_card((path / CARD_FILE).read_text(encoding="utf-8"), license)
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise InputError(f"REPOSITORY is {repository!r}; allowed: USER/NAME")
    if find_spec("huggingface_hub") is None:
        raise InputError("push needs huggingface_hub, which is not installed: pip install 'bertsmith[hf]'")
    (path / CARD_FILE).write_text(card, encoding="utf-8")
    address = _upload(path, repository, private, revision, message or f"Upload {path.resolve().name}")
    print_plain(f"{count_of(len(files), 'file')} uploaded to {address}")
    return PushResult(repository=repository, address=address, files=files)


def _check_folder(path: Path) -> list[str]:
    """Return the files to upload; raise InputError if the folder is not a finished export."""
    if not (path / "config.json").is_file():
        raise InputError(f"{str(path)!r} has no config.json, so it is not a model folder")
    if not (path / CARD_FILE).is_file():
        raise InputError(f"{str(path)!r} has no model card ({CARD_FILE}); write one with `bertsmith export {path}`")
    names = (file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    return sorted(name for name in names if name != MARK and not name.startswith("checkpoints/"))


def _licensed_card(card: str, license: str | None) -> str:
    """Return the model card with a licence in its front matter.

    >>> _licensed_card("---\\nlibrary_name: onnx\\n---\\n# A", "mit")
    '---\\nlicense: mit\\nlibrary_name: onnx\\n---\\n# A'
    """
    front = card.removeprefix("---\n").partition("\n---")[0] if card.startswith("---\n") else ""
    has_license = any(line.startswith("license:") for line in front.splitlines())
    if license is None and not has_license:
        raise InputError("the model card states no licence; give --license, for example apache-2.0")
    if license is None:
        return card
    lines = card.removeprefix("---\n").splitlines(keepends=True)
    lines = [line for line in lines if not line.startswith(("license:", "No licence is stated."))]
    return "".join(["---\n", f"license: {license}\n", *lines])


def _upload(path: Path, repository: str, private: bool, revision: str | None, message: str) -> str:
    """Create the repository and upload the folder in one commit; return its address."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    options: dict[str, Any] = {"repo_id": repository, "repo_type": "model"}
    api = HfApi()
    try:
        api.create_repo(**options, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(**options, branch=revision, exist_ok=True)
        api.upload_folder(
            **options, folder_path=path, revision=revision, commit_message=message, ignore_patterns=_NOT_PUSHED
        )
    except LocalTokenNotFoundError:
        raise InputError("push needs a token of the hub; run `hf auth login`, or set HF_TOKEN") from None
    except (HfHubHTTPError, OSError) as error:
        raise InputError(f"the hub did not accept {repository!r}: {first_line(error)}") from None
    return f"{api.endpoint}/{repository}"
