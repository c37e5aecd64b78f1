"""Capture: verl writes what it sampled, token by token, for `rollsift filter` and `replay`.

Made for `VERL_USE_EXTERNAL_MODULES=rollsift.pipeline.capture` and `ROLLSIFT_CAPTURE=/folder`;
without the folder importing it does nothing. README.md beside this file tells how.
"""

import os
from pathlib import Path

from rollsift.schemas.errors import UsageError

_folder, _recipe = os.environ.get("ROLLSIFT_CAPTURE"), os.environ.get("ROLLSIFT_RECIPE")
if _folder:
    from .hooks import install

    install(Path(_folder).absolute(), _recipe)
elif _recipe:
    raise UsageError("ROLLSIFT_RECIPE needs ROLLSIFT_CAPTURE: what it drops is kept there")
