"""`bertsmith verify`: compare the files of a folder with their checksums."""

from dataclasses import dataclass
from pathlib import Path

from bertsmith.bundled import model_folder
from bertsmith.data.shards import MANIFEST, SPLITS, TokenCorpus, read_manifest
from bertsmith.errors import InputError
from bertsmith.files import SEAL, read_seal, seal_defects
from bertsmith.runs.result import OneShotResult, print_plain


@dataclass(frozen=True, kw_only=True)
class VerifyResult(OneShotResult):
    """Result of a verification; the exit code is 1 if a file is damaged."""

    files: int
    """Number of files that were compared."""
    damaged: list[str]
    """One message for each file that is missing or has changed."""

    @property
    def exit_code(self) -> int:
        """1 if a file is missing or has changed."""
        return 1 if self.damaged else 0


def verify(folder: str | Path) -> VerifyResult:
    """Compare the files of a folder with the checksums that were written with them.

    Checks the seals (seal.json) of the folder and of all folders in it, such as models and checkpoints, and the shards
    of a corpus. Exit code 1 and a line for each damaged file if any is missing or has changed.

    Parameters
    ----------
    folder
        Folder of a model, an export, a run or a corpus; or a bundled model (small).
    """
    root = model_folder(folder)
    if not root.is_dir():
        raise InputError(f"FOLDER is {str(folder)!r}, which is not a folder")
    files, damaged = 0, list[str]()
    sealed = sorted(path.parent for path in root.rglob(SEAL))
    for home in sealed:
        try:
            files += len(read_seal(home))
            damaged += [f"{home}: {defect}" for defect in seal_defects(home)]
        except InputError as error:
            damaged.append(str(error))
    corpora = sorted(path.parent for path in root.rglob(MANIFEST))
    for home in corpora:
        try:
            files += _verify_corpus(home)
        except InputError as error:
            damaged.append(str(error))
    if not sealed and not corpora:
        raise InputError(f"{str(folder)!r} has no {SEAL} and no corpus, so it has no checksums to compare with")
    for message in damaged:
        print_plain(message)
    print_plain(f"{files} files compared, {len(damaged)} damaged")
    return VerifyResult(files=files, damaged=damaged)


def _verify_corpus(folder: Path) -> int:
    """Compare the shards of a corpus with its manifest; return their number."""
    shards = read_manifest(folder).shards
    for split in SPLITS:
        if shards[split]:
            TokenCorpus(folder, split).verify()
    return sum(map(len, shards.values()))
