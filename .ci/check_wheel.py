"""Installs the wheel of a folder into an empty environment and imports every module of it from there.

The environment is new and holds the wheel alone; third-party packages are read from the environment that runs this script (they
are the pinned ones; downloading 2 GB again would prove nothing about the wheel).
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

PROBE = """
import importlib, pkgutil, sys
import afore
assert afore.__file__.startswith(sys.prefix), afore.__file__
names = [m.name for m in pkgutil.walk_packages(afore.__path__, 'afore.')]
extras = {
    'afore.transport.verbs.binding_ibverbs': 'ibverbs',
    'afore.transport.verbs.binding_pyverbs': 'pyverbs',
    'afore.workers.device.cuda.experts_kernel': 'triton',
    'afore.workers.device.cuda.partition_kernel': 'triton',
}
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A binding of RDMA, and kernels of GPUs, are loaded only where somebody has what they need.
        if name not in extras or (error.name or '').split('.')[0] != extras[name]:
            raise
from afore.models.bundle import bundled_model_path
assert (bundled_model_path() / 'model.safetensors').exists()
print(f'{len(names)} modules of afore {afore.__version__} import from the wheel')
"""


def main(folder: str) -> None:
    """Raises ``SystemExit`` with the reason when the wheel lacks something."""
    wheels = sorted(Path(folder).glob("*.whl"))
    if len(wheels) != 1:
        raise SystemExit(f"{folder}: {len(wheels)} wheels, expected one")
    with zipfile.ZipFile(wheels[0]) as archive:
        names = set(archive.namelist())
    for needed in ("afore/py.typed", "afore/transport/api.py", "afore/models/data/tiny-glm4moe/model.safetensors"):
        if needed not in names:
            raise SystemExit(f"{wheels[0].name} lacks {needed}")
    with tempfile.TemporaryDirectory() as directory:
        environment = Path(directory) / "env"
        venv.create(environment, with_pip=False)
        python = environment / "bin" / "python"
        site = Path(
            subprocess.run(
                [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                check=True,
                capture_output=True,
                text=True,
            ).stdout.strip()
        )
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--no-deps", "--target", site, wheels[0]], check=True)
        (site / "third-party.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([python, "-I", "-c", PROBE], check=True, cwd=directory)


if __name__ == "__main__":
    main(sys.argv[1])
