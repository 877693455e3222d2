"""The tiny model from which a run started, kept with its record, because another processor makes other weights.

    results/weights/<sha256>.<suffix>      one file of such a model, named by its content: runs of one model share it

tiny_model.py makes the model before the first run that needs it. Its recipe is in the configuration, but the last bits
of 1,200 supervised steps depend on the processor and on versions. Other models are too large to be kept here.
"""

from pathlib import Path

from input_files import UNFINISHED, InputError, finish_folder, fresh_folder, read_bytes
from lab.records import Record
from lab.store import WEIGHTS, read_index, write_index
from run_record import sha256_file, write_atomically

LARGEST_MIB = 4  # of one model; the tiny model of configs/tiny_cpu.yaml has 1.1


def copies(results: Path, record: Record) -> dict[str, Path]:
    """File of the model's folder -> its place in results/weights/, whether it is there or not."""
    return {
        name: results / WEIGHTS / f"{checksum}{Path(name).suffix or '.bin'}"
        for name, checksum in record.inputs.model.items()
    }


def kept(results: Path, record: Record) -> bool:
    """Whether the model from which the run started can be restored."""
    return all(path.is_file() for path in copies(results, record).values())


def places(run_dir: Path, record: Record) -> list[Path]:
    """Where the model of a run may be: at its path from here, or from the checkout that wrote ``run_dir``."""
    path = record.config["model"]["path"]
    return [Path(path), run_dir.resolve().parent.parent / path]


def keep(results: Path, record: Record, folders: list[Path]) -> str:
    """Copy the tiny model of a run from one of the folders to results/weights/.  -> what was done, in words

    A folder counts only if its files are those that the run recorded when it started.
    """
    path = record.config["model"]["path"]
    if "tiny_model" not in record.config:
        return f"weights of {path} not kept: not a tiny model"
    wanted, index = record.inputs.model, read_index(results)
    names = {place: f"{WEIGHTS}/{place.name}" for place in copies(results, record).values()}
    if kept(results, record) and index.keys() >= {*names.values()}:
        return f"weights of {path}: there already"
    for folder in folders:
        if all((folder / name).is_file() and sha256_file(folder / name) == wanted[name] for name in wanted):
            files = {place: read_bytes(folder / name) for name, place in copies(results, record).items()}
            if (size := sum(map(len, files.values())) / 2**20) > LARGEST_MIB:
                return f"weights of {path} not kept: {size:.1f} MiB; at most {LARGEST_MIB}"
            (results / WEIGHTS).mkdir(exist_ok=True)
            for place, content in files.items():
                write_atomically(place, content)
            write_index(results, index | {name: place.stem for place, name in names.items()})
            return f"weights of {path}: kept, {size:.1f} MiB"
    return f"weights of {path} not kept: {folders[-1]} does not hold the files from which the run started"


def restore(results: Path, record: Record, folder: Path) -> None:
    """Write the model from which the run started to ``folder``; InputError if it was not kept or was changed."""
    if folder.exists() and not (folder / UNFINISHED).exists():
        raise InputError(f"{folder}: exists; needed: a new folder for the model of {record.id}")
    contents = {}
    for name, place in copies(results, record).items():
        if Path(name).name != name:
            raise InputError(f"results/{record.id}: inputs.model: found {name!r}; needed: the name of a file")
        if not place.is_file() or sha256_file(place) != place.stem:
            fault = "edited" if place.is_file() else "not there"
            raise InputError(f"{place}: {fault}; needed: {name} of the model from which {record.id} started")
        contents[name] = read_bytes(place)
    aside = folder.with_name(f".restoring-{folder.name}")
    fresh_folder(aside)
    for name, content in contents.items():
        write_atomically(aside / name, content)
    finish_folder(aside, folder)
