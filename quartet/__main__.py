"""`python -m quartet`: the command `quartet` of a checkout."""

import sys

from quartet.command import main

sys.exit(main())
