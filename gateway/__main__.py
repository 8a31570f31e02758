"""``python -m gateway`` is the command ``warmroute``."""

import sys

from gateway.cli import main

sys.exit(main())
