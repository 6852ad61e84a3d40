"""`python -m tfaccum.train`."""

import sys

from tfaccum.train import main

sys.exit(main())
