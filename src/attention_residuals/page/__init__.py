"""Reports: one HTML file that holds everything it shows."""

from attention_residuals.page.report import ReportFigure, Section, write_report

__all__ = ["ReportFigure", "Section", "write_report"]
