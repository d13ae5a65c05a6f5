"""`python -m outrider` is the `outrider` command."""

from outrider.tools.cli import main

raise SystemExit(main())
