"""`python -m ds_pretrain` is the `ds-pretrain` command."""

import sys

from ds_pretrain.commands.cli import main

sys.exit(main())
