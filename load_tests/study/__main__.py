"""``python -m load_tests.study``; see `load_tests.study.runs`."""

import sys

from load_tests.study.runs import main

sys.exit(main())
