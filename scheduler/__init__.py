"""The coordinator: session, model, lowering, placement, planning, supervision."""
