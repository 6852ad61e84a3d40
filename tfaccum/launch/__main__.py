"""`python -m tfaccum.launch`."""

import sys

from tfaccum.launch import main

sys.exit(main())
